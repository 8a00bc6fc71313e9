"""Processors: how many to use, which ones, and the threads that run on them."""
