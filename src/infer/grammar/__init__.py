"""Constrained decoding: a JSON schema, a pattern, a grammar or a choice as a mask over the vocabulary."""

from infer.grammar.base import Constraint, Grammar, grammar_of
from infer.grammar.compiler import Compiler, make_compiler

__all__ = ["Compiler", "Constraint", "Grammar", "grammar_of", "make_compiler"]
