"""A network from its files, its memory, its export as GGUF, and the catalog of models."""
