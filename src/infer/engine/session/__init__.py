"""Many turns over one cache: their messages and ids, the cached part of them, and the session's file."""
