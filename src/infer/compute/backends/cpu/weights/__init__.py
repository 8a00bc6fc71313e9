"""Weights in the packed layout: how they are packed, unpacked and embedded."""
