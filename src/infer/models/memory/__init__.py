"""The memory that a model needs, and the context and cache that fit. Loads no torch."""
