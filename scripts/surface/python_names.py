"""Rows of the names that `infer` exports: functions with their parameters, classes with their members.

A type is written without the module that defines it, so a row stays the same if a module moves. Each value of a
`Literal` is a row too, so a value that is removed is seen as one.
"""

import ast
import dataclasses
import inspect
import textwrap
from collections.abc import Callable, Iterator
from functools import cached_property
from types import FunctionType, NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_overloads, is_typeddict

import infer
from infer import errors

Row = tuple[str, str]
_PROTOCOLS = ("call", "enter", "exit", "aenter", "aexit", "iter", "next", "aiter", "anext", "len", "getitem")
_SPECIAL = {f"__{name}__" for name in _PROTOCOLS}  # the special methods that users rely on
_KINDS = {
    inspect.Parameter.KEYWORD_ONLY: "keyword",
    inspect.Parameter.VAR_POSITIONAL: "further positions",
    inspect.Parameter.VAR_KEYWORD: "further keywords",
}


def python_rows() -> Iterator[Row]:
    """Yield the rows of every exported name, and of the classes that the results of calls are made of."""
    values = {name: getattr(infer, name) for name in infer.__all__}
    for name, value in (values | _parts_of(values)).items():
        yield from _rows_of_class(name, value) if isinstance(value, type) else _rows_of_function(name, value)
    yield "__version__", type(infer.__version__).__name__
    for name, value in vars(errors).items():  # the pages name errors and warnings that `infer` does not export
        if isinstance(value, type) and value.__module__ == errors.__name__ and name not in values and name[0] != "_":
            yield from _rows_of_class(name, value)
    for former, name in infer._FORMER_NAMES.items():
        yield former, f"a former name of {name}"


def _parts_of(values: dict[str, Any]) -> dict[str, type]:
    """Return the dataclasses and typed dicts beside the exported classes: results contain them, requests take them."""
    modules = {inspect.getmodule(value) for value in values.values() if isinstance(value, type)}
    return {
        name: value
        for module in modules
        for name, value in vars(module).items()
        if isinstance(value, type) and value.__module__ == module.__name__ and not name.startswith("_")  # type: ignore[union-attr]
        if name not in values and (dataclasses.is_dataclass(value) or is_typeddict(value))
    }


def _rows_of_class(name: str, cls: type) -> Iterator[Row]:
    bases = [base.__name__ for base in cls.__bases__ if base is not object]
    yield name, f"class({', '.join(bases)})" if bases else "class"
    if is_typeddict(cls):
        for key, kind in cls.__annotations__.items():
            yield from _typed_row(f"{name}[{key!r}]", kind)
        return
    fields = dataclasses.fields(cls) if dataclasses.is_dataclass(cls) else ()
    for position, field in enumerate(fields, 1):
        place = "keyword" if field.kw_only else f"position {position}"
        yield from _typed_row(f"{name}.{field.name}", field.type, f"field, {place}, ", _default_of(field))
    if not fields and inspect.isfunction(vars(cls).get("__init__")):
        yield from _parameters(name, cls.__init__)  # type: ignore[misc]
    known = {field.name for field in fields}
    for member, value in _members(cls).items():
        if member not in known:
            yield from _rows_of_member(f"{name}.{member}", value)
    if not fields and inspect.isfunction(vars(cls).get("__init__")):
        yield from ((f"{name}.{attribute}", "attribute") for attribute in _attributes_set_by(cls.__init__))  # type: ignore[misc]


def _attributes_set_by(function: Callable[..., Any]) -> set[str]:
    """Return the public attributes of `self` that a function sets."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    attributes = (
        node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
    )
    return {each.attr for each in attributes if ast.unparse(each.value) == "self" and not each.attr.startswith("_")}


def _members(cls: type) -> dict[str, Any]:
    """Return the public members that the class and its bases in `infer` define."""
    found: dict[str, Any] = {}
    for base in reversed(cls.__mro__):
        if base.__module__.partition(".")[0] == infer.__name__:
            found |= {name: value for name, value in vars(base).items() if name[0] != "_" or name in _SPECIAL}
    return found


def _rows_of_member(name: str, value: Any) -> Iterator[Row]:
    if isinstance(value, property | cached_property):
        get: Any = value.fget if isinstance(value, property) else value.func
        yield name, f"property → {shown(inspect.signature(get).return_annotation)}"
    elif isinstance(value, classmethod | staticmethod):
        yield from _rows_of_function(name, value.__func__, f"{type(value).__name__}, ")
    elif inspect.isfunction(value):
        yield from _rows_of_function(name, value)
    elif not inspect.isdatadescriptor(value):
        yield name, f"= {value!r}"


def _rows_of_function(name: str, function: Callable[..., Any], kind: str = "") -> Iterator[Row]:
    is_awaited = inspect.iscoroutinefunction(function)
    yield name, f"{kind}{'async ' * is_awaited}→ {shown(inspect.signature(function).return_annotation)}"
    overloads = get_overloads(function)
    for number, overload in enumerate(overloads, 1):
        yield f"{name}, overload {number}", f"→ {shown(inspect.signature(overload).return_annotation)}"
        yield from _parameters(f"{name}, overload {number}", overload)
    if not overloads:
        yield from _parameters(name, function)


def _parameters(name: str, function: Callable[..., Any]) -> Iterator[Row]:
    for position, each in enumerate(inspect.signature(function).parameters.values()):
        if each.name in ("self", "cls"):
            continue
        is_method = next(iter(inspect.signature(function).parameters)) in ("self", "cls")
        place = _KINDS.get(each.kind, f"position {position + (not is_method)}")
        default = "" if each.default is each.empty else f" = {_value(each.default)}"
        yield from _typed_row(f"{name}({each.name})", each.annotation, f"{place}, ", default)


def _typed_row(name: str, kind: Any, place: str = "", default: str = "") -> Iterator[Row]:
    yield name, f"{place}{shown(kind)}{default}"
    for value in _literals_of(kind):
        yield f"{name} {value!r}", "a choice"


def _literals_of(kind: Any) -> Iterator[Any]:
    for part in kind if isinstance(kind, list) else get_args(kind):
        yield from [part] if get_origin(kind) is Literal else _literals_of(part)


def _default_of(field: dataclasses.Field[Any]) -> str:
    if field.default_factory is not dataclasses.MISSING:
        return f" = {field.default_factory.__name__}()"  # type: ignore[union-attr]
    return "" if field.default is dataclasses.MISSING else f" = {_value(field.default)}"


def _value(value: object) -> str:
    """Return a default as text. A function has no text of its own that stays the same."""
    return "a function" if isinstance(value, FunctionType) else repr(value)


def shown(kind: Any) -> str:
    """Return a type as text, without names of modules, and the same under every version of Python."""
    if isinstance(kind, str):
        return kind
    if isinstance(kind, list):  # the arguments of a Callable
        return f"[{', '.join(map(shown, kind))}]"
    if kind in (None, NoneType, Ellipsis, inspect.Signature.empty):
        return {NoneType: "None", Ellipsis: "...", inspect.Signature.empty: "untyped"}.get(kind, "None")
    origin, parts = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        return " | ".join(map(shown, parts))
    if origin is Literal:
        return f"Literal[{', '.join(map(repr, parts))}]"
    if origin is Annotated:
        return shown(parts[0])
    name = str(getattr(origin or kind, "__name__", None) or str(origin or kind).rpartition(".")[2])
    is_own_alias = (origin or kind).__module__.partition(".")[0] == "numpy"  # its parts differ by version
    return name if origin is None or is_own_alias else f"{name}[{', '.join(map(shown, parts))}]"
