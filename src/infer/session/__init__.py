"""Many turns over one cache: what was said, what the cache holds of it, and its file."""
