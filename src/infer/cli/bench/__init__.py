"""Measure a model here: rates and memory (`speed`), and the time of each part of a step (`profile`)."""
