"""Chat templates rendered in a separate process.

Jinja's sandbox stops code, but not the use of resources: `2 ** (2 ** 33)`, nested loops and strings that double need
only a few characters in an untrusted file. No list of forbidden operations is complete, but a process can be ended.
"""

import signal
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from infer.errors import InvalidRequestError
from infer.system.child_process import MEMORY_BYTES, ChildError, Lane

RENDER_SECONDS = 2.0  # processor seconds
MAX_CHARACTERS = 1 << 24
_WAIT_SECONDS = 120.0  # for a process that waits for a free processor


class TemplateRefusalError(InvalidRequestError):
    """The template refuses the conversation with its own message."""


class TemplateLimitError(InvalidRequestError):
    """The template takes more time, memory or characters than it may."""


@cache
def _lane() -> Lane:
    return Lane(Path(__file__).with_name("template_child.py"), str(RENDER_SECONDS), str(MEMORY_BYTES))


def start_rendering() -> None:
    """Start the process, so that it starts while a model is loaded."""
    _lane().start()


def render(source: str, variables: Mapping[str, Any]) -> str:
    """Return the text, of at most `MAX_CHARACTERS`. Raises InvalidRequestError that points at the template's line."""
    try:
        answer = _lane().ask([source, variables, MAX_CHARACTERS], _WAIT_SECONDS)
    except ChildError as error:
        problem = f"takes more than {RENDER_SECONDS:g} s" if error.signal == signal.SIGPROF else "makes Python crash"
        raise TemplateLimitError(f"the chat template {problem}: it cannot be used") from None
    except (TypeError, ValueError, RecursionError) as error:  # JSON has neither tuples as keys nor 5,000 digits
        raise InvalidRequestError(f"the conversation cannot be passed to a chat template: {error}") from None
    except TimeoutError:
        raise TemplateLimitError(f"the chat template was not rendered within {_WAIT_SECONDS:g} s") from None
    if "text" in answer:
        return str(answer["text"])
    where = "" if answer["line"] is None else f", line {answer['line']},"
    message = " ".join(answer["error"].split())
    match answer["kind"]:
        case "complaint":
            raise TemplateRefusalError(f"the chat template{where} rejects the conversation: {message}")
        case "syntax":
            raise InvalidRequestError(f"the chat template{where} is not valid: {message}")
        case "memory":
            raise TemplateLimitError(f"the chat template takes more than {MEMORY_BYTES >> 20} MiB: it cannot be used")
        case "length":
            raise TemplateLimitError(f"the chat template writes more than {MAX_CHARACTERS:,} characters")
        case _:
            raise InvalidRequestError(f"the chat template{where} fails on the conversation: {message}")
