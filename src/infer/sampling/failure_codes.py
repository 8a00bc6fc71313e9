"""What stands in a token's place where a row failed; `sampler.message_of` says it in words."""

NOT_A_NUMBER, NOTHING_ALLOWED = -1, -2
