"""The bodies that other programs send, as the server, `infer batch`, `infer replay` and the router read them."""
