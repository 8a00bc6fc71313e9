"""The bodies that other programs send: read once, for the server, `infer batch`, `infer replay` and the router."""
