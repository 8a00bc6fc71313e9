"""Prefixes of prompts that are kept beyond their sequences: on disk, and where they differ."""
