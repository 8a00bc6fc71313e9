"""Trials of grammars in a separate process, which may hang, crash or run out of memory.

Every grammar is read and compiled there first. The work for a schema can explode. llguidance 1.9 overflows its stack on
a chain of 5,000 rules, and never returns from a product of large `multipleOf`. xgrammar 0.2 crashes on deep patterns.
No check of the text covers every such case.
"""

import signal
from functools import cache
from pathlib import Path
from typing import Any

import infer
from infer.errors import InvalidRequestError, SchemaError
from infer.system.child_process import ChildError, Lane
from infer.text.grammar.grammar import Grammar, Source
from infer.text.grammar.reading import Read

MEMORY_BYTES = 1 << 30
READ_SECONDS = 4.0  # processor seconds for one grammar
ANSWER_SECONDS = 10.0  # processor seconds for all tools of a request and the text around them
_WAIT_SECONDS = 120.0  # for a process that waits for a free processor


@cache
def trial_lane(backend: str) -> Lane:
    """Return the processes that try grammars for a library.

    Their program, in a package above this one, also prepares tools.
    """
    program = Path(infer.__file__).parent / "engine/prepare/preparing_child.py"
    return Lane(program, backend, str(MEMORY_BYTES), str(READ_SECONDS), str(ANSWER_SECONDS))


def ask_trial(backend: str, question: Any, name: str) -> dict[str, Any]:
    """Return the answer of a trial process. Messages use `name` for the question.

    Raises InvalidRequestError, or SchemaError if the place in a schema is known.
    """
    try:
        answer: dict[str, Any] = trial_lane(backend).ask(question, _WAIT_SECONDS)
    except TimeoutError:
        raise InvalidRequestError(f"{name}: not compiled within {_WAIT_SECONDS:g} s: try again later") from None
    except ChildError as error:
        is_slow = error.signal == signal.SIGPROF
        problem = "takes too long to compile: make it smaller" if is_slow else "too large or too deep to compile"
        raise InvalidRequestError(f"{name}: {problem}") from None
    if "problem" in answer:
        raise SchemaError(answer["error"], answer["pointer"], answer["problem"], param=answer["param"])
    if "error" in answer:
        raise InvalidRequestError(answer["error"], param=answer.get("param"))
    return answer


def try_grammar(backend: str, grammar: Grammar) -> Read:
    """Return the source that the library compiled. Raises InvalidRequestError that points into the grammar."""
    answer = ask_trial(backend, [grammar.kind, grammar.text], grammar.kind)
    return Read(Source(*answer["source"]), tuple(answer["warnings"]))
