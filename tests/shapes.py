"""Shapes and types checked at every call of `infer`: the import hook that conftest installs before anything else.

jaxtyping binds the axes of a call's arrays, which takes many times as long as a call. What has no array in its
signature has no axes either: beartype alone checks it.
"""

from collections.abc import Callable
from dataclasses import is_dataclass
from functools import wraps
from inspect import signature
from pathlib import Path
from types import FunctionType
from typing import Any, Literal, Self, get_args, get_origin

import jaxtyping
from beartype import BeartypeConf, FrozenDict, beartype
from jaxtyping import AbstractArray, TypeCheckError, install_import_hook, jaxtyped

SOURCE = Path(__file__).parents[1] / "src" / "infer"

# jaxtyping decorates methods one by one, where beartype cannot know the class that Self stands for.
_configuration = BeartypeConf(hint_overrides=FrozenDict({Self: Any}), violation_type=TypeCheckError)


def checked(function: Callable[..., Any]) -> Callable[..., Any]:
    return beartype(conf=_configuration)(function)


def checked_modules() -> list[str]:
    """All of `infer` but the kernels that a compiler reads: it cannot read a check's wrapper."""
    names = {path.stem for path in SOURCE.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    return [
        "infer.kernels.reference",
        *(f"infer.{name}" for name in sorted(names - {"__init__", "__main__", "kernels"})),
    ]


def install() -> None:
    jaxtyping.jaxtyped = _jaxtyped  # the name that the hook writes into each module
    install_import_hook(checked_modules(), "shapes.checked")


def _jaxtyped(*, typechecker: Any) -> Callable[[Any], Any]:
    def decorate(thing: Any) -> Any:
        if isinstance(thing, FunctionType):
            return _with_axes(thing) if _has_arrays(thing) else checked(thing)
        if is_dataclass(thing) and isinstance(thing.__init__, FunctionType):
            thing.__init__ = decorate(thing.__init__)
        return thing

    return decorate


def _with_axes(function: FunctionType) -> Callable[..., Any]:
    """Axes of one name are as long as one another in a call's arguments and what it returns."""
    checking = checked(function)

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with jaxtyped("context"):
            return checking(*args, **kwargs)

    return call


def _has_arrays(function: FunctionType) -> bool:
    whole = signature(function)
    hints = [parameter.annotation for parameter in whole.parameters.values()]
    return any(_is_of_arrays(hint, function.__globals__) for hint in (*hints, whole.return_annotation))


def _is_of_arrays(hint: Any, names: dict[str, Any]) -> bool:
    """Whether an array may stand in it; a name that is not there yet may be anything."""
    if isinstance(hint, str):
        try:
            hint = eval(hint, names)
        except NameError:
            return True
    if isinstance(hint, type) and issubclass(hint, AbstractArray):
        return True
    parts = hint if isinstance(hint, list) else () if get_origin(hint) is Literal else get_args(hint)
    return any(_is_of_arrays(part, names) for part in parts)
