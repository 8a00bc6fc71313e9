"""Measurements of a model here: speed, parts of a step, quality of text, importance matrices."""
