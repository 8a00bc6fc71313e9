"""A grammar is read and compiled first in a process of its own, which may hang, crash or run out of memory.

Schemas multiply, llguidance 1.9 overflows its stack on a chain of 5,000 rules and never returns from a product of large
`multipleOf`, xgrammar 0.2 dies of deep patterns. No check on the text alone knows every such case.
"""

import signal
from functools import cache
from pathlib import Path

from infer.errors import InvalidRequestError, SchemaError
from infer.grammar.grammar import Grammar
from infer.grammar.libraries import Source
from infer.grammar.reading import Read
from infer.system.child_process import ChildError
from infer.system.lane import Lane

MEMORY_BYTES = 1 << 30
READ_SECONDS = 4.0  # of a processor
_WAIT_SECONDS = 120.0  # for a process that waits for a processor


@cache
def trial_lane(backend: str) -> Lane:
    """The processes that try grammars for a library."""
    return Lane(Path(__file__).with_name("trial_child.py"), backend, str(MEMORY_BYTES), str(READ_SECONDS))


def try_grammar(backend: str, grammar: Grammar) -> Read:
    """Return the source that the library compiled. Raises InvalidRequestError that points into the grammar."""
    kind, text = grammar
    try:
        answer = trial_lane(backend).ask([kind, text], _WAIT_SECONDS)
    except TimeoutError:
        raise InvalidRequestError(f"{kind}: was not compiled within {_WAIT_SECONDS:g} s; try again later") from None
    except ChildError as error:
        is_slow = error.signal == signal.SIGPROF
        problem = "takes too long to compile; make it smaller" if is_slow else "too large or too deep to compile"
        raise InvalidRequestError(f"{kind}: {problem}") from None
    if "source" in answer:
        return Read(Source(*answer["source"]), answer["ignored"])
    if "problem" in answer:
        raise SchemaError(answer["error"], answer["pointer"], answer["problem"])
    raise InvalidRequestError(answer["error"])
