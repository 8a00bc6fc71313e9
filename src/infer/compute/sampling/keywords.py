"""The sampling arguments of a call, and the only table of their defaults. Loads no torch.

Each value comes from the first source in this list that names it: the request, the command line, the model's files
(`generation_config.json`, GGUF's `general.sampling.*`), the card of a packaged model, the neutral values below.

The arguments of a call are `SamplingParams`, a mapping of its fields, or keywords.
"""

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from difflib import get_close_matches
from typing import Any, Literal, TypedDict, final

from infer.errors import InvalidRequestError
from infer.request_limits import NUM_TOKENS_OF_CALLS
from infer.sampling_params import (
    ALIASES,
    PARAMETER_NAMES,
    HasJsonSchema,
    SamplingParams,
    UnknownParameterError,
    unknown_parameter,
    values_from,
    without_aliases,
)

_GUARD = frozenset({"repetition_penalty", "repetition_window"})
NEUTRAL: Mapping[str, Any] = {"max_new_tokens": NUM_TOKENS_OF_CALLS}
CHAT_DEFAULTS: Mapping[str, Any] = {**NEUTRAL, "temperature": 0.7, "top_p": 0.95}
PRESETS: Mapping[str, Mapping[str, Any]] = {  # --preset NAME
    "seed": {
        "temperature": 0.8,
        "top_k": 40,
        "top_p": 0.9,
        "repetition_penalty": 1.1,
        "repetition_window": 64,
    }
}


@final
class SamplingDefaults(Mapping[str, Any]):
    """Sampling values that a model requests, under the names of SamplingParams. `from_files` overrides `from_card`."""

    __slots__ = ("_merged", "from_card", "from_files")

    def __init__(self, from_files: Mapping[str, Any], from_card: Mapping[str, Any] | None = None) -> None:
        self.from_files = dict(from_files)
        self.from_card = {name: value for name, value in (from_card or {}).items() if name not in self.from_files}
        self._merged = self.from_files | self.from_card

    def __getitem__(self, name: str) -> Any:
        return self._merged[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._merged)

    def __len__(self) -> int:
        return len(self._merged)

    def __repr__(self) -> str:
        return repr(self._merged)


def neutral_values(*, is_chat: bool) -> Mapping[str, Any]:
    """Return the values to use if neither the request nor the model names one."""
    return CHAT_DEFAULTS if is_chat else NEUTRAL


def beside(from_model: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the model's values for the parameters that `given` does not set.

    A card's repetition penalty belongs to the card's temperature, so a caller who sets a temperature samples without
    it.
    """
    found = {name: value for name, value in from_model.items() if name not in given}
    if isinstance(from_model, SamplingDefaults) and "temperature" in given:
        found = {name: value for name, value in found.items() if name not in from_model.from_card.keys() & _GUARD}
    return found


def default_params(from_model: Mapping[str, Any], given: Mapping[str, Any], *, is_chat: bool) -> SamplingParams:
    """Return the parameters of a request that names only `given`.

    Raises InvalidRequestError if a given name is unknown, or its value is invalid.
    """
    given = without_aliases(given)
    return SamplingParams.from_mapping({**neutral_values(is_chat=is_chat), **beside(from_model, given), **given})


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
