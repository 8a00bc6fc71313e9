"""Codes in place of a token for a row that failed. `sampler.message_of` returns the message of a code."""

NOT_A_NUMBER, NOTHING_ALLOWED = -1, -2
