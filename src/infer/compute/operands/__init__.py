"""Operands of the ops: a step's tokens, and weights."""
