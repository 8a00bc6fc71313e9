"""Sampling: logits to tokens. `reference` defines it for one row in plain torch; `noise` is a pure function."""
