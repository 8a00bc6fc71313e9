"""Requests being answered: the loop, what one generation has said, masks, streams."""
