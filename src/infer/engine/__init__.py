"""Requests being answered: the engine and its steps, sequences, slots, masks, streams."""
