"""Memory: how much there is, how fast it is, and caches with a limit."""
