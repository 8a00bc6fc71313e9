"""The thread pool, its dispatch loop, and the waits and atomic numbers that threads share."""
