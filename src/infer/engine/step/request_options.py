"""Options of one request besides its prompt and its sampling. Every value is checked when the options are made."""

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, final, get_args, no_type_check

from infer.compute.operands.limits import GPU_STEP
from infer.compute.sampling.keywords import SamplingKeywords
from infer.model_settings import Overflow, Speculation
from infer.parameters import Count, Flag, Number, OneOf, Other, Text, broken, check_fields, parameter, parameters_of
from infer.request_limits import MAX_BUDGET, MAX_DRAFT_TOKENS, MAX_PRIORITY, NUM_DRAFT_TOKENS
from infer.text.toolcalls.formats import FORMATS
from infer.text.toolcalls.tools import ToolLike

ReasoningPlace = Literal["auto", "none"]


_ANY = Other("checked with the conversation", lambda value: True)
_EVENT = Other("a threading.Event or None", lambda value: value is None or isinstance(value, threading.Event))
CALLBACK = Other("a function or None", lambda value: value is None or callable(value))
_IDS = Other("a list of token ids", lambda value: isinstance(value, Sequence) and not isinstance(value, str | bytes))


# The checks of this class name the broken rule; the type checks of the tests' import hook would raise before them.
@no_type_check
@final
@dataclass(frozen=True, kw_only=True)
class RequestOptions:
    """Options of a request besides its prompt and its sampling. Calls take them as keywords, too.

    Args:
        cancel: Event that ends the answer when another thread sets it.
        speculation: "ngram" verifies tokens that follow an earlier place with the same words; "draft" also those of
            the model's `draft_model` or of its own head. "off" drafts none. None: "draft" if there is one of the two,
            else "off". The tokens of the answer stay the same.
        num_draft_tokens: Largest number of drafted tokens per step.
        prefill_chunk: Largest number of tokens of the prompt per step: at most 512 on a CPU and 8,192 on a GPU. None is
            the device's limit.
        overflow: "truncate_left" drops the beginning of a prompt that is too long; "error" refuses the prompt.
        tenant: Name of a user. Under load, tenants get equal shares of the computed work.
        priority: Each level lets a request pass others of its tenant that were submitted up to 10 seconds earlier.
        timeout: Seconds after which the answer ends with finish_reason "abort", even if it is still waiting.
        cache_salt: With `reuse_prefixes`, only requests with the same salt share beginnings of prompts.
        answer_prefix: Ids with which the answer begins, as if they had been sampled.
        tools: Functions or schemas that the answer may call.
        tool_choice: "auto", "none", "required", the name of a tool, or OpenAI's form.
        parallel_tool_calls: False limits the answer to one call. None: several, but one if a tool is chosen by name.
        tool_format: Name of the format of calls. None: the format that the chat template shows.
        reasoning_format: "auto" returns reasoning as `result.reasoning`; "none" leaves it in the text.
        reasoning_budget: Number of tokens after which the reasoning is closed.

    Raises:
        InvalidRequestError: A value breaks its rule.

    Examples:
        >>> options = RequestOptions(speculation="ngram", timeout=2.5)
        >>> llm.generate("One, two, one, two,", temperature=0, max_new_tokens=4, options=options).text
        ' three, four,'
    """

    cancel: threading.Event | None = parameter(None, _EVENT, "Ends the answer from another thread.")
    speculation: Speculation | None = parameter(
        None, OneOf(get_args(Speculation), is_optional=True), "Draft several tokens and verify them in one step.",
        bodies="generating",
    )  # fmt: skip
    num_draft_tokens: int = parameter(
        NUM_DRAFT_TOKENS, Count(1, MAX_DRAFT_TOKENS), "Limit of drafted tokens per step.", bodies="generating"
    )
    prefill_chunk: int | None = parameter(
        None, Count(1, GPU_STEP.tokens, none="the device's limit"), "Largest number of prompt tokens per step."
    )
    overflow: Overflow = parameter(
        "error", OneOf(get_args(Overflow)), "Policy for a prompt that is too long.", bodies="generating"
    )
    tenant: str = parameter("", Text(may_be_empty=True), "The tenant with whom other tenants share the engine.")
    priority: int = parameter(
        0, Count(-MAX_PRIORITY, MAX_PRIORITY), "Each level counts like 10 seconds of waiting.", bodies="generating"
    )
    timeout: float | None = parameter(
        None, Number(0, excludes_least=True, unit="seconds", is_optional=True), "The answer ends after this time."
    )
    cache_salt: str = parameter(
        "", Text(may_be_empty=True), "Only requests with the same salt share prefixes.", bodies="generating"
    )
    answer_prefix: Sequence[int] = parameter(
        (), _IDS, "Ids with which the answer begins.",
        body_name="answer_token_ids",
    )  # fmt: skip
    tools: Sequence[ToolLike] | None = parameter(None, _ANY, "Functions or their schemas.")
    tool_choice: Any = parameter(None, _ANY, "OpenAI's choice of a tool.")
    parallel_tool_calls: bool | None = parameter(None, Flag(is_optional=True), "An answer may have several calls.")
    tool_format: str | None = parameter(
        None, OneOf(tuple(FORMATS), is_optional=True), "Format of calls.", bodies="conversations"
    )
    reasoning_format: ReasoningPlace = parameter(
        "auto", OneOf(get_args(ReasoningPlace)), "none leaves the reasoning in the text.", bodies="conversations"
    )
    reasoning_budget: int | None = parameter(
        None, Count(0, MAX_BUDGET, none="no limit"), "Number of tokens after which the reasoning ends.",
        body_name="thinking_token_budget",
    )  # fmt: skip

    def __post_init__(self) -> None:
        check_fields(self, OPTIONS)
        object.__setattr__(self, "answer_prefix", tuple(self.answer_prefix))


OPTIONS = parameters_of(RequestOptions)


class RequestKeywords(SamplingKeywords, total=False):
    """Keywords of every call: the fields of `RequestOptions` and of `SamplingParams`."""

    cancel: threading.Event | None
    speculation: Speculation | None
    num_draft_tokens: int
    prefill_chunk: int | None
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
    """Return `options`, or the defaults, with the keywords for options applied; and the other keywords."""
    if options is not None and not isinstance(options, RequestOptions):
        raise broken("options", "RequestOptions or None", options)
    own = {name: value for name, value in keywords.items() if name in OPTIONS}
    made = RequestOptions(**own) if options is None else replace(options, **own)
    return made, {name: value for name, value in keywords.items() if name not in OPTIONS}
