"""Many turns over one cache: its messages and ids, what the cache holds of them, and its file."""
