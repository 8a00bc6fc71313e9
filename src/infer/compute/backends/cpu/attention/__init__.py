"""Attention over cached keys and values, as compiled commands."""
