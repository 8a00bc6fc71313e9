"""Speculative decoding: n-gram drafts, and the number of draft tokens that pays off."""
