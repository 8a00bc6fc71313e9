"""The model's forward over a cache, token by token: what an engine's step runs."""
