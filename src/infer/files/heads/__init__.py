"""Heads for whole texts in a model's files: poolings, classifiers and rerankers. Loads no torch."""
