"""Fields of bodies, made from the declarations of parameters and options."""

import math
from collections.abc import Callable
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta

from infer.engine.step.request_options import OPTIONS
from infer.parameters import Bias, Bodies, Count, Flag, Kind, Number, OneOf, Parameter, Text, Texts, TokenIds
from infer.request_limits import MAX_STOPS, MAX_TOKENS
from infer.sampling_params import PARAMETERS

_Body = TypeVar("_Body", bound=msgspec.Struct)
TokenId = Annotated[int, Meta(ge=0, le=MAX_TOKENS)]
DECLARED: dict[str, Parameter] = {**PARAMETERS, **OPTIONS}


def declares(*bodies: Bodies) -> Callable[[type[_Body]], type[_Body]]:
    """Return a decorator that adds the fields of all parameters and options that are declared for these bodies.

    Each field may be null, which means absent.
    """

    def extend(cls: type[_Body]) -> type[_Body]:
        fields = [
            (each.body_name or name, _described(_type_of(each), each.help) | None, None)
            for name, each in DECLARED.items()
            if each.bodies in bodies
        ]
        namespace = {"__doc__": cls.__doc__, "__qualname__": cls.__qualname__}
        made: Any = msgspec.defstruct(
            cls.__name__, fields, bases=(cls,), namespace=namespace, module=cls.__module__, kw_only=True
        )
        return made  # type: ignore[no-any-return]

    return extend


def values_of(body: msgspec.Struct, declared: dict[str, Parameter]) -> dict[str, Any]:
    """Return the values that a body gives, by their declared names. Null means absent."""
    given = {name: getattr(body, each.body_name or name, None) for name, each in declared.items() if each.bodies}
    return {name: value for name, value in given.items() if value is not None}


def _described(kind: Any, help: str) -> Any:
    """Return the type with its description, which `/openapi.json` has."""
    return Annotated[kind, Meta(description=help)]


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
