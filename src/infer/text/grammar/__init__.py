"""Constrained decoding: a JSON schema, a pattern, a grammar or a choice as a mask over the vocabulary."""
