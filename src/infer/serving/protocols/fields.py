"""The fields of a body: those that are declared, and the rules for all keys: accepted, renamed, ignored or refused.

The caller chose the keys of `Parameters`, so each unknown key there is checked. Other programs wrote the contents of
messages, calls and tools, so unknown keys there are ignored. A refusal has the field's path, and a message that names
the value, the rule and the fix.
"""

import math
import re
from codecs import BOM_UTF8
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import cache
from typing import Annotated, Any, ClassVar, Literal, TypeVar, final

import msgspec
from msgspec import Meta, Struct, inspect

from infer.engine.step.request_options import OPTIONS
from infer.errors import InvalidRequestError
from infer.parameters import Bias, Bodies, Count, Flag, Kind, Number, OneOf, Parameter, Text, Texts, TokenIds
from infer.request_limits import MAX_KEYS, MAX_STOPS, MAX_TOKENS, MAX_WARNINGS
from infer.sampling_params import PARAMETERS
from infer.serving.protocols.foreign import Foreign
from infer.serving.server_settings import UnknownFields
from infer.system.json_limits import JsonLimitError, check_limits

_Body = TypeVar("_Body", bound="Parameters")
TokenId = Annotated[int, Meta(ge=0, le=MAX_TOKENS)]
DECLARED: dict[str, Parameter] = {**PARAMETERS, **OPTIONS}
# Smallest difflib ratio of similar names: "temprature" is similar to "temperature", "top_n" not to "top_k".
_NEAR = 0.82
_OBJECTS = {inspect.StructType, inspect.DictType, inspect.NoneType}


@final
class BodyError(InvalidRequestError):
    """A body breaks a rule. `param` is the path of the field in the body, `code` one of OpenAI's."""

    def __init__(self, message: str, param: str | None, code: str = "invalid_value") -> None:
        super().__init__(message, param=param)
        self.code = code

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (*self.args, self.param, self.code)


def refuse(message: str, param: str | None, code: str = "invalid_value") -> BodyError:
    return BodyError(message, param, code)


def shown(value: Any) -> str:
    """Return a JSON value as text for a message, without long contents."""
    match value:
        case dict():
            return "an object"
        case list():
            return f"a list of {len(value)}"
        case None | bool():
            return {None: "null", True: "true", False: "false"}[value]
    return f"{value!r:.80}"


def declares(*bodies: Bodies) -> Callable[[type[_Body]], type[_Body]]:
    """Return a decorator that adds the fields of all parameters and options that are declared for these bodies.

    Each field may be null, which means absent. `/openapi.json` has the description of its type.
    """

    def extend(cls: type[_Body]) -> type[_Body]:
        fields = [
            (each.body_name or name, Annotated[_type_of(each), Meta(description=each.help)] | None, None)
            for name, each in DECLARED.items()
            if each.bodies in bodies
        ]
        namespace = {"__doc__": cls.__doc__, "__qualname__": cls.__qualname__}
        made: Any = msgspec.defstruct(
            cls.__name__, fields, bases=(cls,), namespace=namespace, module=cls.__module__, kw_only=True
        )
        return made  # type: ignore[no-any-return]

    return extend


def without_nulls(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that are not null: null means absent."""
    return {name: value for name, value in values.items() if value is not None}


def values_of(body: msgspec.Struct, declared: dict[str, Parameter]) -> dict[str, Any]:
    """Return the values that a body gives, by their declared names."""
    return {
        name: value
        for name, each in declared.items()
        if each.bodies and (value := getattr(body, each.body_name or name, None)) is not None
    }


def _type_of(declared: Parameter) -> Any:
    kind: Kind = declared.kind
    match kind:
        case Number():
            bounds: dict[str, Any] = {"gt" if kind.excludes_least and declared.zero is None else "ge": kind.least}
            bounds["lt" if kind.excludes_most else "le"] = MAX_TOKENS if math.isinf(kind.most) else kind.most
            return Annotated[float, Meta(**bounds)]
        case Count():
            most = MAX_TOKENS if kind.most is None else kind.most
            return Annotated[int, Meta(ge=min(kind.least, *declared.none, kind.least), le=most)]
        case Flag():
            return bool
        case Text():
            return str if kind.may_be_empty else Annotated[str, Meta(min_length=1)]
        case OneOf():
            return Literal.__getitem__(kind.values)
        case Texts(required=True):
            return Annotated[list[Annotated[str, Meta(min_length=1)]], Meta(min_length=1)]
        case Texts():
            return str | Annotated[list[str], Meta(max_length=MAX_STOPS)]
        case TokenIds():
            return Annotated[list[TokenId], Meta(min_length=int(kind.required))]
        case Bias():
            return dict[str, float]  # `params` names the id of a number that is out of range
    raise TypeError(f"no body has values of the kind {kind}")


def as_given(given: dict[str, Any], reading: "Reading") -> dict[str, Any]:
    return given


class Parameters(Struct, kw_only=True, omit_defaults=True):
    """An object whose keys the caller chose. `foreign` has the names of other servers that may appear.

    Before a body is read, `complete` converts the formats of other programs in it to known ones.
    """

    foreign: ClassVar[Mapping[str, Foreign]] = {}
    complete: ClassVar[Callable[[dict[str, Any], "Reading"], dict[str, Any]]] = as_given

    @classmethod
    def note_on(cls, given: Mapping[str, Any]) -> str | None:
        """Return a warning about a value that is nevertheless accepted, or None."""


class ToolKeys(Parameters, kw_only=True, omit_defaults=True):
    """An object of a tool. Unknown keys are ignored, with a warning if a key is foreign or similar to a known one."""


@final
@dataclass(frozen=True)
class Reading:
    """The policy with which one body is read, and the warnings about it."""

    policy: UnknownFields = "warn"
    warnings: list[str] = field(default_factory=list)
    given_names: dict[str, str] = field(default_factory=dict)  # names of another server, by our name of the field
    looked_up: list[str] = field(default_factory=list)  # unknown names for which a similar name was searched

    def warn(self, message: str) -> None:
        if self.policy != "ignore" and message not in self.warnings and len(self.warnings) < MAX_WARNINGS:
            self.warnings.append(message)

    def near_of(self, name: str, known: list[str]) -> str | None:
        """Return the known name that `name` misspells, or None, as for all names after the first `MAX_KEYS`."""
        if len(self.looked_up) == MAX_KEYS:
            return None
        self.looked_up.append(name)
        plain = {_plain(each): each for each in known}
        near = get_close_matches(_plain(name)[:64], plain, n=1, cutoff=_NEAR)
        return plain[near[0]] if near else None


def _inside(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _plain(name: str) -> str:
    return name.replace("_", "").replace("-", "").lower()


@final
class _Alternatives:
    """The types that a value may have. `most` is the length of the longest list, if lists have a limit."""

    def __init__(self, *types: inspect.Type) -> None:
        found = [each for kind in types for each in flat(kind)]
        self.kinds = set(map(type, found))
        self.structs = [each for each in found if isinstance(each, inspect.StructType)]
        self.words = [word for each in found if isinstance(each, inspect.LiteralType) for word in each.values]
        lists = [each for each in found if isinstance(each, inspect.ListType)]
        self.most = min((each.max_length for each in lists if each.max_length is not None), default=None)
        self.items = _Alternatives(*(each.item_type for each in lists)) if lists else None


@cache
def _fields_of(cls: type[Struct]) -> dict[str, _Alternatives]:
    described: Any = inspect.type_info(cls)
    return {each.encode_name: _Alternatives(each.type) for each in described.fields}


def flat(found: inspect.Type) -> Iterator[inspect.Type]:
    """Yield the alternatives of a type, without unions and metadata."""
    if isinstance(found, inspect.UnionType):
        for each in found.types:
            yield from flat(each)
    elif isinstance(found, inspect.Metadata):
        yield from flat(found.type)
    else:
        yield found


def _settled(given: Any, allowed: _Alternatives, path: str, reading: Reading) -> Any:
    """Return the value with only the keys of its types, and whole floats as integers if integers are expected.

    Raises BodyError for a misspelled key, for a string that is not one of the allowed ones, and for a parameter that
    would change the answer but is not supported.
    """
    kinds, inner = allowed.kinds, allowed.items
    if given == [] and kinds <= _OBJECTS and not path.endswith("]"):
        given = {}  # PHP writes empty lists and objects alike
    if isinstance(given, dict):
        for each in allowed.structs:
            if each.tag_field is None or given.get(each.tag_field) == each.tag:
                return _settled_object(given, each.cls, path, reading)
        _check_tag(given, allowed.structs, path)
        return given
    if isinstance(given, list):
        if inner is None or (inner.structs and allowed.most is not None and len(given) > allowed.most):
            return given  # refused for its type or its length
        if not inner.structs and (inspect.IntType not in inner.kinds or set(map(type, given)) <= {int}):
            return given
        return [_settled(each, inner, f"{path}[{index}]", reading) for index, each in enumerate(given)]
    if isinstance(given, str) and inspect.StrType not in kinds and allowed.words and given not in allowed.words:
        raise _none_of(allowed.words, given, path)
    if type(given) is float and given.is_integer() and inspect.IntType in kinds and inspect.FloatType not in kinds:
        return int(given)
    return given


def _check_tag(given: dict[str, Any], tagged: list[inspect.StructType], path: str) -> None:
    """Raise BodyError for an object whose tag is missing or unknown."""
    for each in tagged:
        place = _inside(path, str(each.tag_field))
        if each.tag_field not in given:
            raise refuse(f"{place} is missing: it is required", place, "missing_required_parameter")
        if isinstance(value := given[each.tag_field], str):
            raise _none_of([one.tag for one in tagged], value, place)


def _none_of(values: list[Any], given: str, path: str) -> BodyError:
    return refuse(f"{path} must be {' or '.join(map(repr, values))}, got {shown(given)}", path)


def _settled_object(given: dict[str, Any], cls: type[Struct], path: str, reading: Reading) -> dict[str, Any]:
    known_fields = _fields_of(cls)
    if issubclass(cls, Parameters):
        if len(given) > MAX_KEYS:
            raise refuse(f"{path or 'the body'} must have at most {MAX_KEYS} fields, got {len(given)}", path or None)
        tag = cls.__struct_config__.tag_field
        given = _taken(given, [*known_fields, *([tag] if tag else [])], cls, path, reading)
        if note := cls.note_on(given):
            reading.warn(f"{path}{note}")
    return {
        name: _settled(value, known_fields[name], _inside(path, name), reading) if name in known_fields else value
        for name, value in given.items()
    }


def _taken(
    given: dict[str, Any], known: list[str], cls: type[Parameters], path: str, reading: Reading
) -> dict[str, Any]:
    """Return the known keys, including those that foreign keys become. Raises BodyError."""
    found, is_tool = {name: value for name, value in given.items() if name in known}, issubclass(cls, ToolKeys)
    for name, value in given.items():
        if name in known or (value is None and not is_tool):
            continue
        place = _inside(path, name)
        if name in cls.foreign:
            meant = _meant(cls.foreign[name], value, known, place, reading)
            _add(found, meant, place)
            reading.given_names.update(dict.fromkeys(meant, name))
            continue
        near = reading.near_of(name, known)
        hint = f": did you mean {near}?" if near else ""
        if not is_tool and (near or reading.policy == "refuse"):
            raise refuse(f"{place} is not known{hint or ': leave it out'}", place, "unknown_parameter")
        if near or not is_tool:
            reading.warn(f"{place:.100} is not known and was ignored{hint}")
    return found


def _meant(foreign: Foreign, value: Any, known: list[str], path: str, reading: Reading) -> dict[str, Any]:
    """Return our fields for a foreign parameter. Raises BodyError if its value has no equivalent."""
    if foreign.warning:
        reading.warn(f"{path} was ignored: {foreign.warning}")
    if foreign.warning or foreign.is_neutral(value):
        return {}
    if ours := next((each for each in foreign.same_as if each in known), None):
        return {ours: value}
    if foreign.becomes is not None:
        try:
            found = foreign.becomes(value)
        except JsonLimitError as error:
            raise refuse(f"{path} is {error}", path) from None
        except (msgspec.DecodeError, UnicodeEncodeError):
            raise _unbuilt(foreign, value, path) from None
        if all(each in known for each in found):
            return found
    raise _unbuilt(foreign, value, path)


def _unbuilt(foreign: Foreign, value: Any, path: str) -> BodyError:
    if foreign.neutral:
        return refuse(f"{path} must not be {shown(value)}: {foreign.fix}", path, "unsupported_value")
    return refuse(f"{path} is not supported here: {foreign.fix}", path, "unsupported_parameter")


def _add(found: dict[str, Any], meant: Mapping[str, Any], path: str) -> None:
    for name, value in meant.items():
        there = found.get(name)
        if isinstance(there, dict) and isinstance(value, dict):
            value = value | there
        elif name == "cache_salt" and there is not None:
            value = f"{there} {value}"  # `cache_prompt` adds one, and both keep prompts apart
        elif there is not None and there != value:
            raise refuse(f"{path} and {name} are the same parameter with two values: give only one", path)
        found[name] = value


_ESCAPE = re.compile(rb"\\u[dD][89abAB]..\\u[dD][c-fC-F]..|(?P<half>\\u[dD][89a-fA-F]..)|\\.")


def read_body(content: bytes, kind: type[_Body], reading: Reading | None = None) -> _Body:
    """Return the body as a `kind`. Raises BodyError."""
    content = content.removeprefix(BOM_UTF8)
    check_body(content)
    try:
        given = msgspec.json.decode(content)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise refuse(f"the body is not JSON: {_why_not_json(content, error)}", None, "invalid_json") from None
    return body_from(given, kind, reading or Reading())


def check_body(content: bytes) -> None:
    """Check the limits of a body's JSON, before a parser reads it. Raises BodyError."""
    try:
        check_limits(content)
    except JsonLimitError as error:
        raise refuse(f"the body is {error}", None, "invalid_json") from None


def body_from(given: Any, kind: type[_Body], reading: Reading) -> _Body:
    """Return parsed JSON as a body of this kind. Raises BodyError for a wrong field, which the message names."""
    if isinstance(given, dict):
        given = _settled_object(kind.complete(dict(given), reading), kind, "", reading)
    try:
        return msgspec.convert(given, kind)
    except msgspec.ValidationError as error:
        raise _refusal(str(error), given, reading) from None


def _why_not_json(content: bytes, error: Exception) -> str:
    """Return where the text of the body is wrong, or msgspec's message if the text is valid."""
    try:
        content.decode()
    except UnicodeDecodeError as fault:
        return f"byte {fault.start} (0x{content[fault.start]:02x}) is not UTF-8"
    for found in _ESCAPE.finditer(content):
        if half := found["half"]:
            return f"{half.decode()} at byte {found.start()} is half of a surrogate pair, for example of an emoji"
    return str(error)


def _refusal(message: str, given: Any, reading: Reading) -> BodyError:
    """Return the refusal for msgspec's message, which ends in the place of the value: "… - at `$.stop[0]`"."""
    problem, is_inside, place = message.rpartition(" - at `$")
    if not is_inside:
        problem, place = message, ""
    path = place.removesuffix("`").removeprefix(".")
    if problem.startswith("Object missing required field"):
        field = problem.split("`")[1]
        path = f"{path}.{field}" if path else field
        return refuse(f"{path} is missing: it is required", path, "missing_required_parameter")
    code = "invalid_type" if ", got `" in problem else "invalid_value"
    if path.endswith("[...]"):  # msgspec does not name the key of a value inside an object
        path, found = path.removesuffix("[...]"), ""
    else:
        found = f", got {shown(_value_at(given, path))}"
    rule = problem.partition(", got `")[0].replace("Expected ", "expected ")
    given_name = reading.given_names.get(path.partition(".")[0].partition("[")[0])
    whose = f"{given_name} is read as {path}" if given_name else path or "the body"
    return refuse(f"{whose}: {rule}{found}", given_name or path or None, code)


def _value_at(given: Any, path: str) -> Any:
    """Return the value at a path such as `messages[0].role`."""
    for step in path.replace("]", "").replace("[", ".").split("."):
        if step:
            given = given[int(step)] if isinstance(given, list) else given[step]
    return given
