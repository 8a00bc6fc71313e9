"""The sampler as compiled commands."""
