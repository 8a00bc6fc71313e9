"""This machine, and the kernels that are compiled and stored for it. Nothing here loads Numba."""
