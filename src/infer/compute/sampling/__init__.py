"""Sampling: logits to tokens. `definition` defines it for one row in plain torch; `noise` is a pure function."""
