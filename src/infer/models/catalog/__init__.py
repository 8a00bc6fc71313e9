"""The models on this machine, and the contents of a model."""
