"""A Python file as the counter sees it: lines of code, syntax tree, comments and names."""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from syntax import docstrings, nodes_below, nodes_of, nodes_of_types

Function = ast.FunctionDef | ast.AsyncFunctionDef
_TEXTS = (tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", tokenize.STRING))


@dataclass(frozen=True)
class Source:
    """A Python file. A line of code is a line with a token that is neither a comment nor part of a docstring."""

    path: str  # below the root of the repository
    text: str

    @classmethod
    def read(cls, root: Path, path: Path) -> "Source":
        return cls(path.relative_to(root).as_posix(), path.read_text(encoding="utf-8"))

    @property
    def nodes(self) -> list[ast.AST]:
        return nodes_of(self.text)

    @property
    def num_lines(self) -> int:
        """Number of lines, blank ones too."""
        return len(self.text.splitlines())

    @cached_property
    def num_code_lines(self) -> int:
        lines = enumerate(self.text.splitlines(), 1)
        code = {number for number, line in lines if line.strip() and not line.lstrip().startswith("#")}
        texts = nodes_of_types(self.text, ast.Constant, ast.JoinedStr)
        long_texts = (node for node in texts if node.end_lineno != node.lineno)
        return len(code.union(*map(_lines, long_texts)) - self._docstring_lines)

    @cached_property
    def _docstring_lines(self) -> set[int]:
        return {line for text in docstrings(self.text) for line in _lines(text)}

    @property
    def functions(self) -> list[Function]:
        return nodes_of_types(self.text, ast.FunctionDef, ast.AsyncFunctionDef)

    @property
    def class_names(self) -> list[str]:
        return [node.name for node in nodes_of_types(self.text, ast.ClassDef)]

    @property
    def num_statements(self) -> int:
        return sum(isinstance(node, ast.stmt) for node in self.nodes)

    @property
    def num_long_tuples(self) -> int:
        """Number of `tuple[…]` with more than three items in the annotations of functions."""
        arguments = [node.annotation for node in nodes_of_types(self.text, ast.arg)]
        annotations = [*arguments, *(function.returns for function in self.functions)]
        inner = (node for annotation in annotations if annotation is not None for node in nodes_below(annotation))
        return sum(map(_is_long_tuple, inner))

    def num_variables(self, name: str) -> int:
        """Return how often a variable or an argument of this name is bound."""
        names = nodes_of_types(self.text, ast.Name)
        stored = (node.id for node in names if isinstance(node.ctx, ast.Store))
        arguments = (node.arg for node in nodes_of_types(self.text, ast.arg))
        return [*stored, *arguments].count(name)

    def num_comments(self, words: str) -> int:
        """Return the number of comments that begin with the words, in any case, or follow another "#" or a colon so."""
        pattern = re.compile(rf"[#:]\s*{words}", re.IGNORECASE)
        if not pattern.search(self.text):
            return 0
        return sum(pattern.search(comment) is not None for comment in self._comments)

    @cached_property
    def _comments(self) -> list[str]:
        return [token.string for token in self._tokens() if token.type == tokenize.COMMENT]

    def names_and_texts(self) -> Iterator[str]:
        """Yield each identifier, its words joined by "_", and each string, except docstrings."""
        for token in self._tokens():
            if token.type == tokenize.NAME:
                yield re.sub("(?<=[a-z0-9])(?=[A-Z])", "_", token.string)
            elif token.type in _TEXTS and token.start[0] not in self._docstring_lines:
                yield token.string

    def _tokens(self) -> Iterator[tokenize.TokenInfo]:
        return tokenize.generate_tokens(io.StringIO(self.text).readline)


def num_lines_of(function: Function) -> int:
    """Return the number of lines from `def` to the end."""
    return len(_lines(function))


def num_text_lines(text: str) -> int:
    """Return the number of lines of a file that is not Python: of each 120 characters, and none for a blank line."""
    return sum(-(-len(line) // 120) for line in map(str.strip, text.splitlines()))


def _lines(node: ast.expr | ast.stmt) -> range:
    return range(node.lineno, (node.end_lineno or node.lineno) + 1)


def _is_long_tuple(node: ast.AST) -> bool:
    match node:
        case ast.Subscript(value=ast.Name(id="tuple"), slice=ast.Tuple(elts=items)):
            return len(items) > 3
    return False
