"""What a grammar library must give: a source that its compiler reads, a compiled grammar, and matchers over it."""

from abc import ABC, abstractmethod
from collections.abc import Set
from typing import Any, ClassVar, NamedTuple

from infer.grammar.base import Grammar
from infer.grammar.matcher import Matcher


class Source(NamedTuple):
    """A grammar as a library's compiler reads it; `kind` is which of its compilers."""

    kind: str
    text: str


class Backend(ABC):
    """One library over one vocabulary. Compiled grammars are shared; each matcher is one sequence's."""

    name: ClassVar[str]
    keywords: ClassVar[Set[str] | None]
    """The JSON-schema keywords that it enforces; None for all that we know."""

    @abstractmethod
    def source(self, grammar: Grammar) -> Source: ...

    @abstractmethod
    def compile(self, source: Source) -> Any:
        """Called only after a trial of the same source in another process."""

    @abstractmethod
    def make_matcher(self, compiled: Any) -> Matcher: ...
