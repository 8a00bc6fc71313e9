"""The cache of keys and values: rows of tokens in pages, what each token sees, and pages of prompts on disk."""
