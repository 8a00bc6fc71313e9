"""Syntax trees of files, each read once for all checks of a process."""

import ast
from collections.abc import Iterator
from functools import cache
from typing import Any

DEFINITIONS = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


@cache
def nodes_of(text: str) -> list[ast.AST]:
    """Return the nodes of a file's syntax tree, the module first, in the order of `ast.walk`."""
    return nodes_below(ast.parse(text))


@cache
def nodes_of_types(text: str, *types: type[ast.AST]) -> list[Any]:
    """Return a file's nodes of exactly these types."""
    return [node for node in nodes_of(text) if type(node) in types]


def module_of(text: str) -> ast.Module:
    module = nodes_of(text)[0]
    assert isinstance(module, ast.Module)
    return module


@cache
def nodes_below(node: ast.AST) -> list[ast.AST]:
    """Return a node and all below it. It takes half the time of `ast.walk`, and none again."""
    nodes = [node]
    for each in nodes:
        for name in each._fields:
            value = getattr(each, name, None)
            if isinstance(value, list):
                nodes += [item for item in value if isinstance(item, ast.AST)]
            elif isinstance(value, ast.AST):
                nodes.append(value)
    return nodes


def docstrings(text: str) -> Iterator[ast.Constant]:
    """Yield the docstrings of a module, its classes and its functions."""
    for node in nodes_of_types(text, ast.Module, *DEFINITIONS):
        match node.body:
            case [ast.Expr(value=ast.Constant(value=str()) as docstring), *_]:
                yield docstring
