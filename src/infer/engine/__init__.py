"""The requests that are being answered: the engine and its steps, sequences, slots, masks and streams."""
