"""Guessed tokens: n-gram drafts, and how many are worth a step."""
