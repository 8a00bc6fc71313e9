"""Logits to tokens. `reference` defines it for one row in plain torch; `noise` is the randomness, a pure function."""
