"""Read grammars and tools in a process where hangs, crashes and lack of memory do no harm. `trial` runs this program.

It reads lines of JSON: [kind, text] is a grammar, {"format": …, "answer": …} the format of an answer with tools. It
answers each with a line of JSON: {"source": …} with its facts, or {"error": …, "pointer": …, "problem": …}. It imports
neither numpy nor a tokenizer, so that it starts quickly.
"""

import importlib
import json
import os
import resource
import sys
from collections.abc import Callable
from typing import Any, final

from infer.engine.prepare.tool_answers import ToolAnswers
from infer.errors import InvalidRequestError, SchemaError
from infer.system.processes.processor_limit import OverLimitError, watch_limits
from infer.text.grammar.grammar import Grammar
from infer.text.grammar.library_trials import TRIES, read_within

_STACK_BYTES = 4 << 20  # half of a thread's stack, so that a grammar that passes here also passes there
_NICENESS = 10


def answered(prepare: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return the result of `prepare`, or its error."""
    try:
        return prepare()
    except SchemaError as error:
        return {"error": error.args[0], "pointer": error.pointer, "problem": error.problem, "param": error.param}
    except InvalidRequestError as error:
        return {"error": error.args[0], "param": error.param}
    except OverLimitError:
        return {"error": "tools: take too long to compile, even without their schemas: give fewer tools"}
    except MemoryError:
        return {"error": "tools: take too much memory: give fewer or smaller tools"}


@final
class Program:
    """The program. `name` is the library's; the seconds limit one grammar, and all tools of an answer together."""

    def __init__(self, name: str, read_seconds: float, answer_seconds: float) -> None:
        self._name, self._read_seconds, self._answer_seconds = name, read_seconds, answer_seconds
        self._library = importlib.import_module(name)
        self._try = TRIES[name](self._library)
        self._tools = ToolAnswers(self._library, self._try, read_seconds) if name == "llguidance" else None

    def answer(self, question: Any) -> dict[str, Any]:
        if isinstance(question, list):
            return answered(lambda: self._read(Grammar(*question)))
        return answered(lambda: self._prepare(question))

    def _read(self, grammar: Grammar) -> dict[str, Any]:
        read = read_within(self._library, self._name, self._try, grammar, self._read_seconds)
        return {"source": read.source, "warnings": read.warnings}

    def _prepare(self, question: dict[str, Any]) -> dict[str, Any]:
        assert self._tools is not None
        return self._tools.prepare(question, self._answer_seconds)


def _limit(what: int, count: int) -> None:
    hard = resource.getrlimit(what)[1]
    resource.setrlimit(what, (count if hard < 0 else min(count, hard), hard))


def main(name: str, memory_bytes: int, read_seconds: float, answer_seconds: float) -> None:
    _limit(resource.RLIMIT_STACK, _STACK_BYTES)
    _limit(resource.RLIMIT_CORE, 0)
    os.nice(_NICENESS)
    program = Program(name, read_seconds, answer_seconds)
    watch_limits()
    _limit(resource.RLIMIT_DATA, memory_bytes)
    print('""', flush=True)
    for line in sys.stdin:
        print(json.dumps(program.answer(json.loads(line))), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), float(sys.argv[4]))
