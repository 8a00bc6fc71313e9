"""A network from its files: its family's architecture, its weights in layers, and one forward pass."""
