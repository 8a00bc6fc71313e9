"""A grammar library in this process: it compiles sources and makes matchers of compiled grammars."""

from abc import ABC, abstractmethod
from typing import Any, ClassVar

from infer.grammar.libraries import Source
from infer.grammar.matcher import Matcher


class Backend(ABC):
    """One library for one vocabulary. Sequences share compiled grammars; each sequence has its own matcher."""

    name: ClassVar[str]

    @abstractmethod
    def compile(self, source: Source) -> Any:
        """Return a compiled grammar. Call only after a trial of the same source in another process."""

    @abstractmethod
    def make_matcher(self, compiled: Any) -> Matcher: ...

    @abstractmethod
    def num_bytes(self, compiled: Any, source: Source) -> int:
        """Return the memory of a compiled grammar in bytes, measured or estimated."""
