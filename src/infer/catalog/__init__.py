"""The models that exist here, and the contents of a model."""
