"""Processes that prepare what a request may make too large for the server's own process: they return text."""
