"""From a caller's arguments to the loop's thread and back, and the host: the loaded model that all callers share."""
