"""Models over HTTP and in batches: protocols, the server, its page, replicas, and files of requests."""
