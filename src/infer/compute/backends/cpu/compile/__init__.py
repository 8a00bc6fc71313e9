"""Kernels by name: compiled, stored on disk, loaded and called by address."""
