"""The way of a request: from a caller's arguments to the loop's thread, and its answer back."""
