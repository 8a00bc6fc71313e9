"""A grammar library in this process: it compiles sources and makes matchers of what it compiled."""

from abc import ABC, abstractmethod
from typing import Any, ClassVar

from infer.grammar.libraries import Source
from infer.grammar.matcher import Matcher


class Backend(ABC):
    """One library over one vocabulary. Compiled grammars are shared; each matcher is one sequence's."""

    name: ClassVar[str]

    @abstractmethod
    def compile(self, source: Source) -> Any:
        """Called only after a trial of the same source in another process."""

    @abstractmethod
    def make_matcher(self, compiled: Any) -> Matcher: ...

    @abstractmethod
    def num_bytes(self, compiled: Any, source: Source) -> int:
        """Memory of a compiled grammar, measured or by estimate."""
