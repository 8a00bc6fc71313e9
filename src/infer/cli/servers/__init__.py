"""Commands that start, ask and stop servers."""
