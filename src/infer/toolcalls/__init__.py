"""Tool calls and reasoning: how a family writes them, as values of which both a grammar and a parser are made."""
