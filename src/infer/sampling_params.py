"""The parameters of one generation: `SamplingParams`, checked when it is created. Loads no torch.

An instance is always valid and never changes. Every error message names the field, the rule and the value.
"""

import difflib
import json
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import wraps
from inspect import signature
from numbers import Integral, Real
from typing import Any, Literal, Protocol, Self, final, no_type_check, runtime_checkable

from infer.errors import InvalidRequestError

ALIASES = {
    "max_tokens": "max_new_tokens",
    "num_tokens": "max_new_tokens",
    "max_completion_tokens": "max_new_tokens",
}
MAX_LOGPROBS = 20  # alternatives of a token
SEED_BITS = 53  # of a seed that is chosen at random: JSON keeps them in every language
CONSTRAINTS = ("json_schema", "regex", "grammar", "choice")


class UnknownParameterError(InvalidRequestError, TypeError):
    """Error for a name that `SamplingParams` does not have."""


@final
class FrozenBias(Mapping[int, float]):
    """An immutable, hashable, picklable map from token id to bias."""

    __slots__ = ("_bias_by_id",)

    def __init__(self, bias_by_id: Mapping[int, float]) -> None:
        self._bias_by_id = dict(bias_by_id)

    def __getitem__(self, token_id: int) -> float:
        return self._bias_by_id[token_id]

    def __iter__(self) -> Iterator[int]:
        return iter(self._bias_by_id)

    def __len__(self) -> int:
        return len(self._bias_by_id)

    def __hash__(self) -> int:
        return hash(frozenset(self._bias_by_id.items()))

    def __repr__(self) -> str:
        return repr(self._bias_by_id)


@runtime_checkable
class HasJsonSchema(Protocol):
    """A class that returns its own JSON schema, as Pydantic's classes do."""

    def model_json_schema(self) -> dict[str, Any]: ...


def _takes_aliases(cls: type) -> type:
    """Return the class with a constructor that also accepts each parameter by an alias."""
    make = cls.__init__  # type: ignore[misc]  # that of this very class

    @wraps(make)
    def __init__(self: object, **values: Any) -> None:  # noqa: N807
        make(self, **without_aliases(values))

    cls.__init__ = __init__  # type: ignore[misc]  # the dataclass has made its own by now
    shown = signature(make)  # help() would show that of __new__
    setattr(cls, "__signature__", shown.replace(parameters=list(shown.parameters.values())[1:]))  # noqa: B010
    return cls


# Its own checks name the rule, and take the integer 0 for the temperature 0.0: those of the tests' hook come too early.
@no_type_check
@_takes_aliases
@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class SamplingParams:
    """Parameters of how one sequence is sampled and where it stops. None, or the neutral default value, turns a
    parameter off.

    After construction `stop` is a tuple, `stop_token_ids` and `allowed_token_ids` are frozen sets, `logit_bias` is an
    immutable copy and `json_schema` is text. An empty `logit_bias` becomes None. `max_tokens`, `num_tokens` and
    `max_completion_tokens` are aliases of `max_new_tokens`. Raises InvalidRequestError.
    """

    temperature: float = 1.0  # [0, 2]; 0 is greedy
    top_k: int | None = None  # keep exactly k
    top_p: float = 1.0  # [0, 1]; the crossing token stays, so 0 keeps one
    min_p: float = 0.0  # [0, 1), of the largest probability
    repetition_penalty: float = 1.0  # > 0; each distinct id of prompt and output, once
    repetition_window: int | None = None  # the last N ids; None is all, 0 is none
    frequency_penalty: float = 0.0  # [-2, 2], per occurrence in the output
    presence_penalty: float = 0.0  # [-2, 2], once if in the output
    logit_bias: Mapping[int, float] | None = None  # -inf bans, +inf forces
    allowed_token_ids: Collection[int] | None = None  # everything else is banned
    max_new_tokens: int | None = 128  # None: to the end of the context
    min_new_tokens: int = 0  # no EOS, stop id or stop string before
    stop: str | Sequence[str] | None = None
    stop_token_ids: Collection[int] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    seed: int | None = None  # [0, 2**64); None is chosen at random and reported
    logprobs: int | None = None  # 0..20 alternatives per token
    logprobs_mode: Literal["raw", "processed"] = "raw"
    temperature_last: bool = False  # temperature after the filters
    json_schema: str | Mapping[str, Any] | HasJsonSchema | None = None  # text, a mapping, or a class of Pydantic
    regex: str | None = None
    grammar: str | None = None
    choice: Sequence[str] | None = None

    def __new__(cls, *positional: object, **values: object) -> Self:
        if positional:
            raise UnknownParameterError(f"sampling parameters are given by name, got {positional[0]!r} without one")
        for name in values:
            if name not in PARAMETER_NAMES and name not in ALIASES:
                raise UnknownParameterError(unknown_parameter(name))
        return object.__new__(cls)

    def __post_init__(self) -> None:
        for name, check in _CHECK_BY_NAME.items():
            object.__setattr__(self, name, check(name, getattr(self, name)))
        if self.max_new_tokens is not None and self.min_new_tokens > self.max_new_tokens:
            raise InvalidRequestError(
                f"min_new_tokens must be at most max_new_tokens ({self.max_new_tokens}), got {self.min_new_tokens}"
            )
        given = [name for name in CONSTRAINTS if getattr(self, name) is not None]
        if len(given) > 1:
            raise InvalidRequestError(
                f"at most one of {', '.join(CONSTRAINTS)} can be given, got {' and '.join(given)}"
            )

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> Self:
        """Return the parameters from a request or a settings file.

        Aliases are accepted, `top_k` 0 or −1 is off, and bias ids may be text.
        """
        return cls(**values_from(values))

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0

    def __repr__(self) -> str:
        """Return the fields that differ from the defaults."""
        given = [(field.name, getattr(self, field.name)) for field in fields(self)]
        shown = [f"{name}={_shown(value)}" for name, value in given if value != _DEFAULTS[name]]
        return f"SamplingParams({', '.join(shown)})"


PARAMETER_NAMES = tuple(field.name for field in fields(SamplingParams))


def without_aliases(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values with aliases replaced by field names.

    Raises InvalidRequestError for a parameter that is given by two names.
    """
    named: dict[str, Any] = {}
    for alias, value in values.items():
        name = ALIASES.get(alias, alias)
        if name in named:
            given = [each for each in values if ALIASES.get(each, each) == name]
            raise InvalidRequestError(f"{name} is given twice, as {' and as '.join(given)}: give it once")
        named[name] = value
    return named


def unknown_parameter(name: str) -> str:
    """Return the message for an unknown parameter name, with the nearest known name."""
    near = difflib.get_close_matches(name, [*PARAMETER_NAMES, *ALIASES], n=1)
    if near:
        meant = ALIASES.get(near[0], near[0])
        return f"unknown sampling parameter {name!r}: did you mean {meant}?"
    return f"unknown sampling parameter {name!r}: known are {', '.join(PARAMETER_NAMES)}"


def values_from(mapping: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that a request or a settings file names, as `SamplingParams.from_mapping` reads them."""
    for name in mapping:
        if not isinstance(name, str):
            raise UnknownParameterError(f"sampling parameters are given by name, got {_shown(name)}")
    named = without_aliases(mapping)
    if type(named.get("top_k")) is int and named["top_k"] in (0, -1):
        named["top_k"] = None
    if isinstance(bias := named.get("logit_bias"), Mapping):
        named["logit_bias"] = {_id_from_text(token_id): value for token_id, value in bias.items()}
    return named


def _shown(value: object) -> str:
    shown = repr(value)
    return shown if len(shown) <= 80 else shown[:77] + "..."


def _broken(name: str, rule: str, value: object) -> InvalidRequestError:
    return InvalidRequestError(f"{name} must be {rule}, got {_shown(value)}")


def _integer(value: object) -> int | None:
    return None if isinstance(value, bool) or not isinstance(value, Integral) else int(value)


def _real(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, Real):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf


def _id_from_text(token_id: object) -> object:
    return int(token_id) if isinstance(token_id, str) and token_id.isdecimal() else token_id


Check = Callable[[str, Any], Any]


def _number(rule: str, is_valid: Callable[[float], bool]) -> Check:
    def check(name: str, value: object) -> float:
        number = _real(value)
        if number is None or not math.isfinite(number) or not is_valid(number):
            raise _broken(name, rule, value)
        return number

    return check


def _count(rule: str, is_valid: Callable[[int], bool], *, optional: bool = True) -> Check:
    def check(name: str, value: object) -> int | None:
        if optional and value is None:
            return None
        number = _integer(value)
        if number is None or not is_valid(number):
            raise _broken(name, rule, value)
        return number

    return check


def _flag(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise _broken(name, "True or False", value)
    return value


def _strings(name: str, value: object) -> tuple[str, ...]:
    strings = (value,) if isinstance(value, str) else value
    if strings is None:
        return ()
    if not isinstance(strings, Collection) or isinstance(strings, bytes | Mapping):
        raise _broken(name, "a string or a list of strings", value)
    for string in strings:
        if not isinstance(string, str) or not string:
            raise _broken(name, "a string or a list of strings, none empty", value)
        _check_encodable(name, string)
    return tuple(strings)


def _choice(name: str, value: object) -> tuple[str, ...] | None:
    if value is None:
        return None
    strings = None if isinstance(value, str) else _strings(name, value)
    if not strings:
        raise _broken(name, "a list of at least one string", value)
    return strings


def _text(name: str, value: object) -> str | None:
    if value is not None and (not isinstance(value, str) or not value):
        raise _broken(name, "a string that is not empty", value)
    if value is not None:
        _check_encodable(name, value)
    return value


def _check_encodable(name: str, text: str) -> None:
    """Raise InvalidRequestError for a lone surrogate, half a character of UTF-16, which no text of a model contains."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise _broken(name, f"Unicode text without the lone surrogate U+{ord(text[error.start]):04X}", text) from None


def _schema(name: str, value: object) -> str | None:
    if isinstance(value, HasJsonSchema):
        value = _schema_of(name, value)
    if isinstance(value, Mapping):
        try:
            value = json.dumps(dict(value), ensure_ascii=False)
        except RecursionError:
            raise InvalidRequestError(f"{name} is nested too deep: at most 64 levels are read") from None
        except (TypeError, ValueError) as error:
            raise InvalidRequestError(f"{name} must be JSON: {error}") from error
    elif value is not None and not isinstance(value, str):
        raise _broken(name, "JSON as a mapping or a string, or a class with model_json_schema()", value)
    return _text(name, value)


def _schema_of(name: str, value: HasJsonSchema) -> object:
    try:
        return value.model_json_schema()
    except (AttributeError, NameError, RuntimeError, TypeError, ValueError) as error:  # what Pydantic raises
        problem = " ".join(str(error).split())[:200]
        raise InvalidRequestError(f"{name}: model_json_schema() fails: {problem}") from error


def _token_ids(name: str, value: object) -> frozenset[int]:
    if not isinstance(value, Collection) or isinstance(value, str | bytes | Mapping):
        raise _broken(name, "a list of token ids", value)
    token_ids = [_integer(token_id) for token_id in value]
    if any(token_id is None or token_id < 0 for token_id in token_ids):
        raise _broken(name, "a list of token ids (integers from 0)", value)
    return frozenset(token_id for token_id in token_ids if token_id is not None)


def _stop_token_ids(name: str, value: object) -> frozenset[int]:
    return frozenset() if value is None else _token_ids(name, value)


def _allowed_token_ids(name: str, value: object) -> frozenset[int] | None:
    if value is None:
        return None
    token_ids = _token_ids(name, value)
    if not token_ids:
        raise _broken(name, "None or a list of at least one token id", value)
    return token_ids


def _bias(name: str, value: object) -> FrozenBias | None:
    if value is None or isinstance(value, FrozenBias):
        return value
    if not isinstance(value, Mapping):
        raise _broken(name, "a map from token id to bias", value)
    bias_by_id: dict[int, float] = {}
    for key, bias in value.items():
        token_id, number = _integer(key), _real(bias)
        if token_id is None or token_id < 0:
            raise _broken(name, "a map from token ids (integers from 0)", key)
        if number is None or math.isnan(number):
            raise _broken(f"{name}[{token_id}]", "a number", bias)
        bias_by_id[token_id] = number
    return FrozenBias(bias_by_id) if bias_by_id else None


def _mode(name: str, value: object) -> str:
    if value not in ("raw", "processed"):
        raise _broken(name, "'raw' or 'processed'", value)
    return str(value)


_CHECK_BY_NAME: dict[str, Check] = {
    "temperature": _number("in [0, 2]", lambda t: 0 <= t <= 2),
    "top_k": _count("at least 1, or None for off", lambda k: k >= 1),
    "top_p": _number("in [0, 1]", lambda p: 0 <= p <= 1),
    "min_p": _number("in [0, 1)", lambda p: 0 <= p < 1),
    "repetition_penalty": _number("above 0 and finite", lambda penalty: penalty > 0),
    "repetition_window": _count("at least 0, or None for all", lambda n: n >= 0),
    "frequency_penalty": _number("in [-2, 2]", lambda penalty: -2 <= penalty <= 2),
    "presence_penalty": _number("in [-2, 2]", lambda penalty: -2 <= penalty <= 2),
    "logit_bias": _bias,
    "allowed_token_ids": _allowed_token_ids,
    "max_new_tokens": _count("at least 1, or None for the whole context", lambda n: n >= 1),
    "min_new_tokens": _count("an integer of at least 0", lambda n: n >= 0, optional=False),
    "stop": _strings,
    "stop_token_ids": _stop_token_ids,
    "include_stop_str_in_output": _flag,
    "ignore_eos": _flag,
    "seed": _count("an integer in [0, 2**64), or None", lambda s: 0 <= s < 2**64),
    "logprobs": _count(f"an integer in 0..{MAX_LOGPROBS}, or None for off", lambda n: 0 <= n <= MAX_LOGPROBS),
    "logprobs_mode": _mode,
    "temperature_last": _flag,
    "json_schema": _schema,
    "regex": _text,
    "grammar": _text,
    "choice": _choice,
}

_DEFAULTS = {field.name: _CHECK_BY_NAME[field.name](field.name, field.default) for field in fields(SamplingParams)}
