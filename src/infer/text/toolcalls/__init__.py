"""Tool calls and reasoning: each family's notation as values, from which both a grammar and a parser are made."""
