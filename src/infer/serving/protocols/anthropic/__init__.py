"""Anthropic's Messages API: its bodies, and how they become requests."""
