"""Implementations of `ops`: `reference` (plain torch, the definition), `cpu` (Numba), `cuda` (Triton), `opencl`."""
