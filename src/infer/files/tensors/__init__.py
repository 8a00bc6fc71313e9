"""Tensors in files: their places, their names, and what formats changed about them."""
