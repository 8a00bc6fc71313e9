"""The sampling arguments of a call: `SamplingParams`, a mapping of its fields, or keywords. Loads no torch."""

import re
from collections.abc import Collection, Mapping, Sequence
from difflib import get_close_matches
from typing import Any, Literal, TypedDict

from infer.compute.sampling.defaults import default_params
from infer.errors import InvalidRequestError
from infer.sampling_params import (
    ALIASES,
    PARAMETER_NAMES,
    HasJsonSchema,
    SamplingParams,
    UnknownParameterError,
    unknown_parameter,
    values_from,
)

Params = SamplingParams | Mapping[str, Any]

# Keywords of the calls and variables of chat templates that a misspelt keyword may have meant.
_CALLS_TAKE = (
    "on_token",
    "options",
    "cancel",
    "speculation",
    "num_draft_tokens",
    "prefill_chunk",
    "on_prefill",
    "overflow",
)
_TEMPLATE_TAKES = (
    *("tools", "documents", "chat_template", "add_generation_prompt", "continue_final_message", "allow_special"),
    "enable_thinking",
)


class SamplingKeywords(TypedDict, total=False):
    """The fields of `SamplingParams`, and the aliases of `max_new_tokens`."""

    temperature: float
    top_k: int | None
    top_p: float
    min_p: float
    repetition_penalty: float
    repetition_window: int | None
    frequency_penalty: float
    presence_penalty: float
    logit_bias: Mapping[int, float] | None
    allowed_token_ids: Collection[int] | None
    max_new_tokens: int | None
    max_tokens: int | None
    num_tokens: int | None
    max_completion_tokens: int | None
    min_new_tokens: int
    stop: str | Sequence[str] | None
    stop_token_ids: Collection[int] | None
    include_stop_str_in_output: bool
    ignore_eos: bool
    seed: int | None
    logprobs: int | None
    logprobs_mode: Literal["raw", "processed"]
    temperature_last: bool
    json_schema: str | Mapping[str, Any] | HasJsonSchema | None
    regex: str | None
    grammar: str | None
    choice: Sequence[str] | None


def params_of(
    params: Params | None, keywords: Mapping[str, Any], defaults: Mapping[str, Any], *, is_chat: bool
) -> SamplingParams:
    """Return the parameters of a call: `SamplingParams` unchanged, or a mapping or keywords over the model's
    `defaults`.

    Raises InvalidRequestError if both are given, and for values that no parameter can have.
    """
    for name in keywords:
        if name not in PARAMETER_NAMES and name not in ALIASES:
            raise UnknownParameterError(unknown_parameter(name, "keyword", _CALLS_TAKE))
    if params is not None and keywords:
        raise InvalidRequestError(
            f"params and {next(iter(keywords))}= are both given: put all values into params, or give only keywords"
        )
    if isinstance(params, SamplingParams):
        return params
    if params is not None and not isinstance(params, Mapping):
        raise InvalidRequestError(f"params must be SamplingParams or a mapping of its fields, got {params!r:.80}")
    return default_params(defaults, values_from(params or keywords), is_chat=is_chat)


def split_keywords(keywords: Mapping[str, Any], templates: Sequence[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the keywords for sampling, and the keywords for a chat template.

    Raises UnknownParameterError for a name that none of the model's templates mentions and that is close to a known
    name.
    """
    sampling, variables = {}, {}
    for name, value in keywords.items():
        if name in PARAMETER_NAMES or name in ALIASES:
            sampling[name] = value
            continue
        if name not in _TEMPLATE_TAKES and not _mentions(templates, name):
            known = (*PARAMETER_NAMES, *ALIASES, *_CALLS_TAKE, *_TEMPLATE_TAKES)
            if get_close_matches(name, known, n=1, cutoff=0.8):
                raise UnknownParameterError(unknown_parameter(name, "keyword", (*_CALLS_TAKE, *_TEMPLATE_TAKES)))
        variables[name] = value
    return sampling, variables


def refuse_sampling(keywords: Mapping[str, Any], templates: Sequence[str]) -> None:
    """Raise UnknownParameterError for a sampling keyword, if a call takes only variables of a chat template.

    A name that one of the model's templates mentions is allowed.
    """
    sampling, _ = split_keywords(keywords, templates)
    for name in sampling:
        if not _mentions(templates, name):
            raise UnknownParameterError(f"{name} is a sampling parameter: pass it to send() or stream()")


def _mentions(templates: Sequence[str], name: str) -> bool:
    return any(re.search(rf"\b{re.escape(name)}\b", template) for template in templates)
