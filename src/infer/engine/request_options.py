"""Options of one request besides its prompt and its sampling. Every value is checked when the options are made."""

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from math import inf
from typing import Any, Literal, final, get_args, no_type_check

from infer.engine.fair_queueing import MAX_PRIORITY
from infer.engine.model_settings import Overflow, Speculation
from infer.errors import InvalidRequestError
from infer.operands.limits import MAX_STEP_TOKENS
from infer.sampling.keywords import SamplingKeywords
from infer.speculation.ngram import MAX_DRAFT_TOKENS, NUM_DRAFT_TOKENS
from infer.toolcalls.formats import FORMATS
from infer.toolcalls.tools import ToolLike

ReasoningPlace = Literal["auto", "none"]
MAX_BUDGET = 1 << 20


# Its own checks name the rule: those of the tests' hook come too early.
@no_type_check
@final
@dataclass(frozen=True, kw_only=True)
class RequestOptions:
    """`cancel` ends the answer from another thread, and so does closing the model.

    Where more is asked than can run at once, tenants get equal shares of what is computed. Of a tenant's requests one
    of a higher `priority` enters first, as if it had come 10 seconds earlier for each level. After `timeout` seconds an
    answer ends with what it has, finish_reason "abort", also while it waits. With `reuse_prefixes` the beginnings of
    prompts are shared only among requests of the same `cache_salt`. An answer begins with the ids of
    `answer_prefix` and goes on as if these had been sampled.

    The others are of conversations. `tools` are functions or schemas; `tool_choice` and `parallel_tool_calls` are
    OpenAI's; `tool_format` names how calls are written, where the chat template does not tell. Reasoning is the
    result's `reasoning`, or left in its text with `reasoning_format` "none"; it ends after `reasoning_budget` tokens.
    """

    cancel: threading.Event | None = None
    speculation: Speculation | None = None
    num_draft_tokens: int = NUM_DRAFT_TOKENS
    prefill_chunk: int = MAX_STEP_TOKENS  # tokens of a prompt in one step
    overflow: Overflow = "error"  # what happens to a prompt that is too long
    tenant: str = ""
    priority: int = 0
    timeout: float | None = None
    cache_salt: str = ""
    answer_prefix: Sequence[int] = ()
    tools: Sequence[ToolLike] | None = None
    tool_choice: Any = None  # "auto", "none", "required", a name, or as OpenAI has it
    parallel_tool_calls: bool | None = None  # None: several, but one of a tool that is chosen by its name
    tool_format: str | None = None
    reasoning_format: ReasoningPlace = "auto"
    reasoning_budget: int | None = None

    def __post_init__(self) -> None:
        if self.cancel is not None and not isinstance(self.cancel, threading.Event):
            raise InvalidRequestError(f"cancel must be a threading.Event or None, got {self.cancel!r:.80}")
        if self.speculation is not None:
            check_choice("speculation", self.speculation, get_args(Speculation), " or None")
        check_count("num_draft_tokens", self.num_draft_tokens, 1, MAX_DRAFT_TOKENS)
        check_count("prefill_chunk", self.prefill_chunk, 1, MAX_STEP_TOKENS)
        check_choice("overflow", self.overflow, get_args(Overflow))
        for name in ("tenant", "cache_salt"):
            if not isinstance(value := getattr(self, name), str):
                raise InvalidRequestError(f"{name} must be a string, got {value!r:.80}")
        check_count("priority", self.priority, -MAX_PRIORITY, MAX_PRIORITY)
        if isinstance(self.answer_prefix, str | bytes) or not isinstance(self.answer_prefix, Sequence):
            raise InvalidRequestError(f"answer_prefix must be a list of token ids, got {self.answer_prefix!r:.80}")
        if self.timeout is not None:
            check_seconds("timeout", self.timeout)
        if not isinstance(self.parallel_tool_calls, bool | None):
            raise InvalidRequestError(
                f"parallel_tool_calls must be True, False or None, got {self.parallel_tool_calls!r:.80}"
            )
        if self.tool_format is not None:
            check_choice("tool_format", self.tool_format, tuple(FORMATS), " or None")
        check_choice("reasoning_format", self.reasoning_format, get_args(ReasoningPlace))
        if self.reasoning_budget is not None:
            check_count("reasoning_budget", self.reasoning_budget, 0, MAX_BUDGET)


_NAMES = frozenset(field.name for field in fields(RequestOptions))


class RequestKeywords(SamplingKeywords, total=False):
    """Keywords of every call: the fields of `RequestOptions` and of `SamplingParams`."""

    cancel: threading.Event | None
    speculation: Speculation | None
    num_draft_tokens: int
    prefill_chunk: int
    overflow: Overflow
    tenant: str
    priority: int
    timeout: float | None
    cache_salt: str
    answer_prefix: Sequence[int]
    tools: Sequence[ToolLike] | None
    tool_choice: Any
    parallel_tool_calls: bool | None
    tool_format: str | None
    reasoning_format: ReasoningPlace
    reasoning_budget: int | None


def split_options(options: RequestOptions | None, keywords: Mapping[str, Any]) -> tuple[RequestOptions, dict[str, Any]]:
    """`options`, or the default ones, changed by the keywords that are theirs; and the other keywords."""
    if options is not None and not isinstance(options, RequestOptions):
        raise InvalidRequestError(f"options must be RequestOptions or None, got {options!r:.80}")
    own = {name: value for name, value in keywords.items() if name in _NAMES}
    return replace(options or RequestOptions(), **own), {n: v for n, v in keywords.items() if n not in _NAMES}


def check_choice(name: str, value: object, choices: tuple[str, ...], others: str = "") -> None:
    """Raises InvalidRequestError."""
    if not isinstance(value, str) or value not in choices:
        raise InvalidRequestError(f"{name} must be {' or '.join(map(repr, choices))}{others}, got {value!r:.80}")


def check_count(name: str, value: object, least: int, most: int) -> None:
    """Raises InvalidRequestError."""
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise InvalidRequestError(f"{name} must be a whole number in [{least}, {most}], got {value!r:.80}")


def check_seconds(name: str, value: object) -> None:
    """Raises InvalidRequestError."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < inf:
        raise InvalidRequestError(f"{name} must be a number of seconds above 0 or None, got {value!r:.80}")


def check_callback(name: str, value: object) -> None:
    """Raises InvalidRequestError."""
    if value is not None and not callable(value):
        raise InvalidRequestError(f"{name} must be a function or None, got {value!r:.80}")
