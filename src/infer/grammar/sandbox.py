"""A grammar is compiled first in a process of its own, which may hang, crash or run out of memory in our place.

llguidance 1.9 overflows its stack on a chain of 5,000 rules and never returns from a product of large `multipleOf`;
xgrammar 0.2 dies of deep patterns. No check on the text alone knows every such case.
"""

from functools import cache
from pathlib import Path
from typing import final

from infer.errors import InvalidRequestError
from infer.grammar.backend import Source
from infer.system.child_process import Child, ChildError

COMPILE_SECONDS = 2.0
MEMORY_BYTES = 1 << 30


@final
class Trial:
    """One process for one backend."""

    def __init__(self, backend: str) -> None:
        self._backend = backend
        self._child = Child(Path(__file__).with_name("sandbox_child.py"), backend, str(MEMORY_BYTES))

    def run(self, source: Source, where: str) -> str:
        """The compiler's message, "" where it is content.

        Raises InvalidRequestError where it needs too long, crashes or takes too much memory.
        """
        try:
            return str(self._child.ask(source, COMPILE_SECONDS))
        except TimeoutError:
            raise InvalidRequestError(
                f"{where}: takes more than {COMPILE_SECONDS:g} s to compile; make it smaller or less ambiguous"
            ) from None
        except ChildError:
            raise InvalidRequestError(f"{where}: too large or too deep for {self._backend} to compile") from None

    def close(self) -> None:
        self._child.close()


@cache
def trial_of(backend: str) -> Trial:
    return Trial(backend)
