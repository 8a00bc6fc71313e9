"""What ops take: a step's tokens, and weights."""
