"""Processes that prepare requests whose work may be too large for the server's own process. They return text."""
