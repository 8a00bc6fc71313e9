"""How a parameter is declared: the kind of its values, which checks them, and the facts that other modules need.

A field of `SamplingParams`, `RequestOptions`, `ModelSettings` or `ServerSettings` is declared once, with `parameter`.
Its checks are made from the declaration, and so are the keywords of calls, the fields of bodies, the options of the
command line, the controls of the page and the tables in `docs`. This module imports neither torch nor msgspec.
"""

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property
from numbers import Integral, Real
from typing import Any, Literal, Protocol, final, runtime_checkable

from infer.errors import InvalidRequestError
from infer.system.spellings import parse_size

Bodies = Literal["generating", "completions", "conversations"]
_MOST_SHOWN = 80  # most characters of a value in a message


class Kind(ABC):
    """The values that a parameter may have."""

    @property
    @abstractmethod
    def rule(self) -> str:
        """The rule in words, as in "top_p must be in (0, 1]"."""

    @abstractmethod
    def check(self, name: str, value: Any) -> Any:
        """Return the value as it is stored. Raises InvalidRequestError."""

    def broken(self, name: str, value: object) -> InvalidRequestError:
        return broken(name, self.rule, value)


@final
@dataclass(frozen=True)
class Number(Kind):
    """A finite number. The limits `least` and `most` are allowed unless they are excluded."""

    least: int | float = -math.inf
    most: int | float = math.inf
    excludes_least: bool = False
    excludes_most: bool = False
    unit: str = ""
    is_optional: bool = False

    @property
    def rule(self) -> str:
        if math.isinf(self.most):
            rule = f"above {self.least:g}" if self.excludes_least else f"at least {self.least:g}"
            rule = f"a number of {self.unit} {rule}" if self.unit else f"{rule} and finite"
        else:
            opening, closing = "(" if self.excludes_least else "[", ")" if self.excludes_most else "]"
            rule = f"in {opening}{self.least:g}, {self.most:g}{closing}"
        return rule + (" or None" if self.is_optional else "")

    def check(self, name: str, value: Any) -> float | None:
        if value is None and self.is_optional:
            return None
        number = _real(value)
        excluded = [self.least] * self.excludes_least + [self.most] * self.excludes_most
        if number is None or not math.isfinite(number) or not self.least <= number <= self.most or number in excluded:
            raise self.broken(name, value)
        return number


@final
@dataclass(frozen=True)
class Count(Kind):
    """A whole number. `none` is the meaning of None, if None is allowed."""

    least: int = 0
    most: int | None = None
    none: str = ""

    @property
    def rule(self) -> str:
        if self.most is None:
            rule = f"at least {self.least}"
        else:
            most = "2**64)" if self.most == 2**64 - 1 else f"{self.most}]"
            rule = f"a whole number in [{self.least}, {most}"
        return rule + (f", or None for {self.none}" if self.none else "")

    def check(self, name: str, value: Any) -> int | None:
        if value is None and self.none:
            return None
        number = _integer(value)
        if number is None or number < self.least or (self.most is not None and number > self.most):
            raise self.broken(name, value)
        return number


@final
@dataclass(frozen=True)
class Flag(Kind):
    """True or False."""

    is_optional: bool = False

    @property
    def rule(self) -> str:
        return "True, False or None" if self.is_optional else "True or False"

    def check(self, name: str, value: Any) -> bool | None:
        if not isinstance(value, bool) and not (value is None and self.is_optional):
            raise self.broken(name, value)
        return value


@final
@dataclass(frozen=True)
class Text(Kind):
    """A string. If it may not be empty, it may be None."""

    may_be_empty: bool = False

    @property
    def rule(self) -> str:
        return "a string" if self.may_be_empty else "a string that is not empty"

    def check(self, name: str, value: Any) -> str | None:
        if value is None and not self.may_be_empty:
            return None
        if not isinstance(value, str) or not (value or self.may_be_empty):
            raise self.broken(name, value)
        check_encodable(name, value)
        return value


@final
@dataclass(frozen=True)
class OneOf(Kind):
    """One of a few strings. `is_list` is True if the rule lists them without quotes.

    An object whose text is a value after `prefix` means this value, as `torch.float16` means "float16".
    """

    values: tuple[str, ...]
    is_optional: bool = False
    is_list: bool = False
    prefix: str = ""

    @property
    def rule(self) -> str:
        if self.is_list:
            return f"one of {', '.join(self.values)}"
        return " or ".join(map(repr, self.values)) + (" or None" if self.is_optional else "")

    def check(self, name: str, value: Any) -> str | None:
        if value is None and self.is_optional:
            return None
        text = str(value).removeprefix(self.prefix) if self.prefix and not isinstance(value, str) else value
        if not isinstance(text, str) or text not in self.values:
            raise self.broken(name, value)
        return text


@final
@dataclass(frozen=True)
class Whole(Kind):
    """A whole number of Python. The command checks it, too, and shows its range in help, if `is_range`."""

    least: int
    most: int | None = None
    is_optional: bool = False
    is_range: bool = True

    @property
    def rule(self) -> str:
        return f"a whole number from {self.least}"

    def check(self, name: str, value: Any) -> int | None:
        if value is None and self.is_optional:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or value < self.least:
            raise self.broken(name, value)
        return value


@final
@dataclass(frozen=True)
class Size(Kind):
    """A number of bytes, or a size such as "8GB", which is stored as its number of bytes. None stays None."""

    rule = 'a number of bytes or a size such as "8GB"'

    def check(self, name: str, value: Any) -> int | None:
        num_bytes = parse_size(value) if isinstance(value, str) else value
        if num_bytes is None and value is None:
            return None
        if isinstance(num_bytes, bool) or not isinstance(num_bytes, int) or num_bytes < 0:
            raise self.broken(name, value)
        return num_bytes


@final
@dataclass(frozen=True)
class Texts(Kind):
    """Several strings, none of them empty. Unless `required`, one string is allowed, too. No string becomes None."""

    required: bool = False

    @property
    def rule(self) -> str:
        return "a list of at least one string" if self.required else "a string or a list of strings, none empty"

    def check(self, name: str, value: Any) -> tuple[str, ...] | None:
        if value is None:
            return None
        texts = (value,) if isinstance(value, str) and not self.required else value
        if not isinstance(texts, Collection) or isinstance(texts, str | bytes | Mapping):
            raise self.broken(name, value)
        for text in texts:
            if not isinstance(text, str) or not text:
                raise self.broken(name, value)
            check_encodable(name, text)
        if self.required and not texts:
            raise self.broken(name, value)
        return tuple(texts) or None


@final
@dataclass(frozen=True)
class TokenIds(Kind):
    """A set of token ids. Unless `required`, None is the empty set."""

    required: bool = False

    @property
    def rule(self) -> str:
        return "None or a list of at least one token id" if self.required else "a list of token ids (integers from 0)"

    def check(self, name: str, value: Any) -> frozenset[int] | None:
        if value is None:
            return None if self.required else frozenset()
        if not isinstance(value, Collection) or isinstance(value, str | bytes | Mapping):
            raise self.broken(name, value)
        token_ids = [_integer(token_id) for token_id in value]
        if any(token_id is None or token_id < 0 for token_id in token_ids) or (self.required and not token_ids):
            raise self.broken(name, value)
        return frozenset(token_id for token_id in token_ids if token_id is not None)


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


@final
@dataclass(frozen=True)
class Bias(Kind):
    """A map from token ids to numbers. An empty map becomes None."""

    @property
    def rule(self) -> str:
        return "a map from token ids (integers from 0) to numbers"

    def check(self, name: str, value: Any) -> FrozenBias | None:
        if value is None or isinstance(value, FrozenBias):
            return value
        if not isinstance(value, Mapping):
            raise self.broken(name, value)
        bias_by_id: dict[int, float] = {}
        for key, bias in value.items():
            token_id, number = _integer(key), _real(bias)
            if token_id is None or token_id < 0:
                raise self.broken(name, key)
            if number is None or math.isnan(number):
                raise broken(f"{name}[{token_id}]", "a number", bias)
            bias_by_id[token_id] = number
        return FrozenBias(bias_by_id) if bias_by_id else None


@runtime_checkable
class HasJsonSchema(Protocol):
    """A class that returns its own JSON schema, as Pydantic's classes do."""

    def model_json_schema(self) -> dict[str, Any]: ...


@final
@dataclass(frozen=True)
class Schema(Kind):
    """A JSON schema, stored as text."""

    @property
    def rule(self) -> str:
        return "JSON as a mapping or a string, or a class with model_json_schema()"

    def check(self, name: str, value: Any) -> str | None:
        if isinstance(value, HasJsonSchema):
            value = _schema_of(name, value)
        if isinstance(value, Mapping):
            try:
                value = json.dumps(dict(value), ensure_ascii=False)
            except RecursionError:
                raise InvalidRequestError(
                    f"{name} is nested too deeply: it must have at most 64 levels", param=name
                ) from None
            except (TypeError, ValueError) as error:
                raise InvalidRequestError(f"{name} must be JSON: {error}", param=name) from error
        elif value is not None and not isinstance(value, str):
            raise self.broken(name, value)
        return Text().check(name, value)


def _schema_of(name: str, value: HasJsonSchema) -> object:
    try:
        return value.model_json_schema()
    except (AttributeError, NameError, RuntimeError, TypeError, ValueError) as error:  # the errors that Pydantic raises
        problem = " ".join(str(error).split())[:200]
        raise InvalidRequestError(f"{name}: model_json_schema() fails: {problem}", param=name) from error


@final
@dataclass(frozen=True)
class Other(Kind):
    """Values that have their own test and are stored unchanged."""

    words: str
    is_valid: Callable[[Any], bool]

    @property
    def rule(self) -> str:
        return self.words

    def check(self, name: str, value: Any) -> Any:
        if not self.is_valid(value):
            raise self.broken(name, value)
        return value


ANY = Other("checked where it is used", lambda value: True)


@final
@dataclass(frozen=True, kw_only=True)
class Parameter:
    """The declaration of a parameter. Its name and type are those of the field.

    `help` describes it in one sentence. `none` are numbers that mean None in bodies and on the command line. If
    the kind excludes 0, `zero` is the value that 0 means in bodies and in files. The option of a setting is shown with
    the others of its `group`.
    """

    kind: Kind
    default: Any
    help: str
    none: tuple[int, ...] = ()
    zero: float | None = None
    bodies: Bodies | None = None  # the bodies that have a field for it
    body_name: str = ""  # its name in them, if it differs
    other_names: tuple[str, ...] = ()  # its names in the bodies of other programs, or as a keyword of theirs
    stage: str = ""  # heading of its sampler stage in a trace
    is_filter: bool = False  # True if it has no effect on a greedy answer
    slider: tuple[int | float, int | float, int | float] | None = None  # of the page: from, to, step
    group: str = ""  # group of its option
    flags: tuple[str, ...] = ()  # flags of its option, if they are not its name alone
    metavar: str | None = None  # of its option
    envvar: str | None = None  # environment variable that its option reads
    takes: str = ""  # type of its keyword, if the kind converts it

    @cached_property
    def stored_default(self) -> Any:
        """The default as `kind` stores it."""
        return self.kind.check("the default", self.default)


def parameter(default: Any, kind: Kind, help: str, **others: Any) -> Any:
    """Return a dataclass field with the declaration of a parameter."""
    declared = Parameter(kind=kind, default=default, help=help, **others)
    return field(default=default, metadata={"parameter": declared})


def parameters_of(cls: type) -> dict[str, Parameter]:
    """Return the declarations of a class's fields, by name."""
    return {each.name: each.metadata["parameter"] for each in fields(cls) if each.metadata}


def check_fields(values: Any, parameters: Mapping[str, Parameter]) -> None:
    """Check the fields of a frozen dataclass that have no default, and store all. Raises InvalidRequestError."""
    for name, declared in parameters.items():
        value, stored = getattr(values, name), declared.stored_default
        is_default = value is declared.default or value is stored
        object.__setattr__(values, name, stored if is_default else declared.kind.check(name, value))


def broken(name: str, rule: str, value: object) -> InvalidRequestError:
    """Return the error for a value that breaks a parameter's rule."""
    return InvalidRequestError(f"{name} must be {rule}, got {shown(value)}", param=name)


def shown(value: object) -> str:
    """Return a value for a message, truncated if it is long."""
    text = repr(value)
    return text if len(text) <= _MOST_SHOWN else text[: _MOST_SHOWN - 3] + "..."


def check_encodable(name: str, text: str) -> None:
    """Raise InvalidRequestError for a lone surrogate (half a UTF-16 character), which no text of a model contains."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise broken(name, f"Unicode text without the lone surrogate U+{ord(text[error.start]):04X}", text) from None


def _integer(value: object) -> int | None:
    return None if isinstance(value, bool) or not isinstance(value, Integral) else int(value)


def _real(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, Real):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf
