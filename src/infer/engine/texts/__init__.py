"""Whole texts: vectors, scores, labels, and the trace of a text's tokens."""
