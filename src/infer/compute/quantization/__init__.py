"""Quantised numbers: the block types of GGUF files and the formats of keys and values."""
