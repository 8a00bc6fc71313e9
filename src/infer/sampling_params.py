"""The parameters of one generation: `SamplingParams`, checked when it is created. Imports neither torch nor msgspec.

An instance is always valid and never changes. Every error message names the field, the rule and the value. Each field
declares its parameter for the library, bodies, the command line, the page and the docs.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from difflib import get_close_matches
from functools import wraps
from typing import Any, Literal, Self, no_type_check

from infer.errors import InvalidRequestError
from infer.parameters import (
    Bias,
    Count,
    Flag,
    FrozenBias,
    HasJsonSchema,
    Number,
    OneOf,
    Schema,
    Text,
    Texts,
    TokenIds,
    check_fields,
    parameter,
    parameters_of,
    shown,
)
from infer.request_limits import MAX_LOGPROBS, NUM_TOKENS_OF_PARAMS

__all__ = ["FrozenBias", "HasJsonSchema", "SamplingParams", "UnknownParameterError"]

ALIASES = {
    "max_tokens": "max_new_tokens",
    "num_tokens": "max_new_tokens",
    "max_completion_tokens": "max_new_tokens",
}
SEED_BITS = 53  # bits of a random seed, which JSON numbers keep in every language
CONSTRAINTS = ("json_schema", "regex", "grammar", "choice")
SMALLEST_TOP_P = 2e-7  # keeps only the likeliest token, as smaller values do: above the margin of `noise.target`


class UnknownParameterError(InvalidRequestError, TypeError):
    """Error for a name that `SamplingParams` does not have."""


def _takes_aliases(cls: type) -> type:
    """Return the class with a constructor that also accepts each parameter by an alias, and names an unknown one."""
    make = cls.__init__  # type: ignore[misc]  # the constructor of this class itself

    @wraps(make)
    def __init__(self: object, *positional: object, **values: Any) -> None:  # noqa: N807
        if positional:
            raise UnknownParameterError(f"sampling parameters are given by name, got {positional[0]!r} without one")
        for name in values:
            if name not in PARAMETER_NAMES and name not in ALIASES:
                raise UnknownParameterError(unknown_parameter(name))
        make(self, **without_aliases(values))

    cls.__init__ = __init__  # type: ignore[misc]  # replaces the constructor that dataclass made
    return cls


# The checks of this class name the broken rule and accept the integer 0 for the temperature 0.0. The type checks of the
# tests' import hook would raise before them.
@no_type_check
@_takes_aliases
@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class SamplingParams:
    """Parameters that define how one sequence is sampled and where it stops.

    None, or the neutral default value, turns a parameter off. After construction `stop` is None or a tuple,
    `stop_token_ids` and `allowed_token_ids` are frozen sets, `logit_bias` is an immutable copy and `json_schema` is
    text. An empty `stop` or `logit_bias` becomes None.

    Args:
        temperature: 0 is greedy. With `temperature_last` it is applied after the filters.
        top_k: Keep exactly the k likeliest tokens.
        top_p: Keep the likeliest tokens up to this total probability. The token that crosses it stays.
        min_p: Drop tokens below this share of the largest probability.
        repetition_penalty: Lower the logit of each distinct id of prompt and answer, once.
        repetition_window: Number of last ids that the repetition penalty covers. None covers all.
        frequency_penalty: Lower a logit by this, once per occurrence of the id in the answer.
        presence_penalty: Lower a logit by this, once if the id occurs in the answer.
        logit_bias: Added to the logit of each id. −inf bans an id, +inf forces it.
        allowed_token_ids: All other ids are banned.
        max_new_tokens: None continues to the end of the context. `max_tokens`, `num_tokens` and
            `max_completion_tokens` are aliases.
        min_new_tokens: The answer does not end before it has this many tokens.
        stop: Strings that end the answer. They are cut off.
        stop_token_ids: Ids that end the answer, like the model's own.
        include_stop_str_in_output: Keep the stop string that ended the answer.
        ignore_eos: Continue after the model's end-of-sequence ids.
        seed: None chooses a random seed, and reports it.
        logprobs: Number of likeliest alternatives per token. None reports no log-probabilities.
        logprobs_mode: "processed" takes log-probabilities after mask, bias, penalties and filters.
        temperature_last: Apply the temperature after the filters.
        json_schema: Constrain the answer to this schema: text, a mapping, or a class of Pydantic.
        regex: Constrain the answer to this pattern.
        grammar: Constrain the answer to this grammar in Lark's syntax.
        choice: Constrain the answer to one of these strings.

    Raises:
        InvalidRequestError: A value breaks its rule, or two constraints are given.

    Examples:
        >>> SamplingParams(temperature=0, max_tokens=64)
        SamplingParams(temperature=0.0, max_new_tokens=64)
    """

    temperature: float = parameter(
        1.0, Number(0, 2), "0 is greedy.", bodies="generating", stage="temperature", slider=(0, 2, 0.05)
    )
    top_k: int | None = parameter(
        None, Count(1, none="off"), "Keep the k likeliest tokens; 0 is off.", none=(0, -1),
        bodies="generating", stage="top-k", is_filter=True, slider=(0, 200, 1),
    )  # fmt: skip
    top_p: float = parameter(
        1.0, Number(0, 1, excludes_least=True), "Keep the likeliest tokens up to this total probability; 1 is off.",
        zero=SMALLEST_TOP_P, bodies="generating", stage="top-p", is_filter=True, slider=(0.01, 1, 0.01),
    )  # fmt: skip
    min_p: float = parameter(
        0.0, Number(0, 1, excludes_most=True), "Drop tokens below this share of the likeliest; 0 is off.",
        bodies="generating", stage="min-p", is_filter=True, slider=(0, 0.99, 0.01),
    )  # fmt: skip
    repetition_penalty: float = parameter(
        1.0, Number(0, excludes_least=True), "Lower each id of prompt and answer once; 1 is off.",
        bodies="generating", other_names=("repeat_penalty",), stage="repetition", slider=(0.5, 2, 0.05),
    )  # fmt: skip
    repetition_window: int | None = parameter(
        None, Count(0, none="all"), "The repetition penalty covers the last N tokens; -1 is all, 0 is none.",
        none=(-1,), bodies="generating", other_names=("repeat_last_n",),
    )  # fmt: skip
    frequency_penalty: float = parameter(
        0.0, Number(-2, 2), "Lower each id of the answer, once per occurrence; 0 is off.",
        bodies="completions", stage="frequency", slider=(-2, 2, 0.1),
    )  # fmt: skip
    presence_penalty: float = parameter(
        0.0, Number(-2, 2), "Lower each id of the answer once; 0 is off.",
        bodies="completions", stage="presence", slider=(-2, 2, 0.1),
    )  # fmt: skip
    logit_bias: Mapping[int, float] | None = parameter(
        None, Bias(), "Added to a token's logit; -inf bans it, inf forces it.", bodies="completions", stage="bias"
    )
    allowed_token_ids: Collection[int] | None = parameter(
        None, TokenIds(required=True), "Only these tokens are possible.", bodies="generating"
    )
    max_new_tokens: int | None = parameter(
        NUM_TOKENS_OF_PARAMS, Count(1, none="the whole context"),
        "Largest number of tokens to generate; -1: to the end of the context.", none=(-1,), body_name="max_tokens",
        other_names=("max_new_tokens", "n_predict", "num_predict"), slider=(1, 4096, 1),
    )  # fmt: skip
    min_new_tokens: int = parameter(
        0, Count(0), "The answer does not end before this many tokens.", bodies="generating", body_name="min_tokens",
        other_names=("min_new_tokens",), stage="minimum",
    )  # fmt: skip
    stop: str | Sequence[str] | None = parameter(
        None, Texts(), "Stop before this text.", bodies="completions", other_names=("stop_sequences",)
    )
    stop_token_ids: Collection[int] | None = parameter(
        None, TokenIds(), "Tokens that end the answer, like the model's own.", bodies="generating"
    )
    include_stop_str_in_output: bool = parameter(
        False, Flag(), "Keep the stop string that ended the answer.", bodies="generating"
    )
    ignore_eos: bool = parameter(False, Flag(), "Continue after the end of text.", bodies="generating")
    seed: int | None = parameter(
        None, Count(0, 2**64 - 1, none="a random one"), "Seed; the same seed gives the same answer."
    )
    logprobs: int | None = parameter(
        None, Count(0, MAX_LOGPROBS, none="off"), "Log-probabilities of each token, and of the N likeliest."
    )
    logprobs_mode: Literal["raw", "processed"] = parameter(
        "raw", OneOf(("raw", "processed")), "processed: after mask, bias, penalties and filters."
    )
    temperature_last: bool = parameter(
        False, Flag(), "Apply the temperature after the filters.", bodies="generating", stage="temperature"
    )
    json_schema: str | Mapping[str, Any] | HasJsonSchema | None = parameter(
        None, Schema(), "Constrain the answer to a JSON schema."
    )
    regex: str | None = parameter(
        None, Text(), "Constrain the answer to a pattern.", bodies="generating", other_names=("guided_regex",)
    )
    grammar: str | None = parameter(None, Text(), "Constrain the answer to a Lark grammar.", bodies="generating")
    choice: Sequence[str] | None = parameter(
        None, Texts(required=True), "Constrain the answer to one of these texts.", bodies="generating",
        other_names=("guided_choice",),
    )  # fmt: skip

    def __post_init__(self) -> None:
        check_fields(self, PARAMETERS)
        if self.max_new_tokens is not None and self.min_new_tokens > self.max_new_tokens:
            raise InvalidRequestError(
                f"min_new_tokens must be at most max_new_tokens ({self.max_new_tokens}), got {self.min_new_tokens}",
                param="min_new_tokens",
            )
        given = [name for name in CONSTRAINTS if getattr(self, name) is not None]
        if len(given) > 1:
            message = f"at most one of {', '.join(CONSTRAINTS)} may be given, got {' and '.join(given)}"
            raise InvalidRequestError(message, param=given[-1])

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> Self:
        """Return the parameters from a request or a settings file.

        Args:
            values: Values by name. Aliases are accepted, numbers that mean None become None (`top_k` 0 or −1,
                `repetition_window` and `max_new_tokens` −1), and bias ids may be text.

        Returns:
            The parameters.

        Raises:
            InvalidRequestError: A name is unknown or given twice, or a value breaks its rule.

        Examples:
            >>> SamplingParams.from_mapping({"max_tokens": -1, "top_k": 0})
            SamplingParams(max_new_tokens=None)
        """
        return cls(**values_from(values))

    @property
    def is_greedy(self) -> bool:
        """True if the largest logit is chosen, without noise."""
        return self.temperature == 0

    def __repr__(self) -> str:
        """Return the fields that differ from the defaults."""
        given = [(field.name, getattr(self, field.name)) for field in fields(self)]
        text = [f"{name}={shown(value)}" for name, value in given if value != _DEFAULTS[name]]
        return f"SamplingParams({', '.join(text)})"


PARAMETERS = parameters_of(SamplingParams)
PARAMETER_NAMES = tuple(PARAMETERS)
FILTER_NAMES = tuple(name for name, declared in PARAMETERS.items() if declared.is_filter)
_DEFAULTS = {name: declared.stored_default for name, declared in PARAMETERS.items()}


def without_aliases(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values with aliases replaced by field names.

    Raises InvalidRequestError for a parameter that is given by two names.
    """
    named: dict[str, Any] = {}
    for alias, value in values.items():
        name = ALIASES.get(alias, alias)
        if name in named:
            given = [each for each in values if ALIASES.get(each, each) == name]
            raise InvalidRequestError(f"{name} is given twice, as {' and as '.join(given)}: give it once", param=name)
        named[name] = value
    return named


def unknown_parameter(name: str, kind: str = "sampling parameter", others: Sequence[str] = ()) -> str:
    """Return the message for an unknown name, with the most similar name of the parameters and of `others`."""
    near = get_close_matches(name, [*PARAMETER_NAMES, *ALIASES, *others], n=1)
    if near:
        return f"unknown {kind} {name!r}: did you mean {ALIASES.get(near[0], near[0])}?"
    return f"unknown {kind} {name!r}: use one of {', '.join((*others, *PARAMETER_NAMES))}"


def values_from(mapping: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that a request or a settings file sets, as `SamplingParams.from_mapping` reads them."""
    for name in mapping:
        if not isinstance(name, str):
            raise UnknownParameterError(f"sampling parameters are given by name, got {shown(name)}")
    named = without_aliases(mapping)
    for name, value in named.items():
        if name in PARAMETERS and type(value) is int and value in PARAMETERS[name].none:
            named[name] = None
    if isinstance(bias := named.get("logit_bias"), Mapping):
        named["logit_bias"] = {_id_from_text(token_id): value for token_id, value in bias.items()}
    return named


def without_zeros(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a body or a file, in which other programs allow a 0 that is outside a parameter's rule.

    Such a 0 becomes the value that it means: a `top_p` of 0 keeps one token.
    """
    zeros = {name: declared.zero for name, declared in PARAMETERS.items() if declared.zero is not None}
    is_zero = {name: name in zeros and value == 0 and value is not False for name, value in values.items()}
    return {name: zeros[name] if is_zero[name] else value for name, value in values.items()}


def signed(seed: int) -> int:
    """Return the signed integer with the same 64 bits as a seed, which is taken modulo 2⁶⁴."""
    word = seed % 2**64
    return word - 2**64 if word >= 2**63 else word


def _id_from_text(token_id: object) -> object:
    return int(token_id) if isinstance(token_id, str) and token_id.isdecimal() else token_id
