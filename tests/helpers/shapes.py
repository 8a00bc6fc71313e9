"""Shapes and types checked at every call of `infer`: the import hook that conftest installs before anything else.

jaxtyping's own wrapper binds and checks the arguments of every function twice, ten times the work. Here beartype checks
a function once, within a scope for the names of axes if an array stands in its signature.
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

from extent import IS_WHOLE

SOURCE = Path(__file__).parents[2] / "src" / "infer"

# Methods are decorated one by one, so beartype cannot know the class that Self stands for.
# Calls check some choices themselves, and tests read the error. Beartype would raise its own error before.
_POOLING = Literal["mean", "last", "cls", "max", "weightedmean", "mean_sqrt_len"]
_OWN_CHECKS = FrozenDict({Self: Any, Literal["ngram"]: str, Literal["error", "truncate_left"]: str, _POOLING: str})
_typed = beartype(conf=BeartypeConf(is_pep484_tower=True, hint_overrides=_OWN_CHECKS, violation_type=TypeCheckError))


def checked_modules() -> list[str]:
    """Return all modules of `infer` except kernels, because their compiler cannot read a wrapper with checks.

    The hook takes all modules of a package that it is given, so packages that contain kernels are not given.
    """
    kernels = ("infer.compute.backends.cpu.", "infer.compute.backends.cuda.")
    no_kernels = ("infer.compute.backends.cpu.backend", "infer.compute.backends.cpu.capture.")
    names = (".".join(["infer", *path.relative_to(SOURCE).with_suffix("").parts]) for path in SOURCE.rglob("*.py"))
    own = [name for name in names if name.startswith(no_kernels) or not name.startswith(kernels)]
    modules = {name.removesuffix(".__init__") for name in own} - {"infer.__main__"}
    return sorted(name for name in modules if not any(kernel.startswith(f"{name}.") for kernel in kernels))


def install() -> None:
    jaxtyping.jaxtyped = lambda *, typechecker: checked  # the hook puts it before all definitions of a module
    install_import_hook(checked_modules(), "shapes.checked")


def checked(thing: Any) -> Any:
    """Return a function with checked arguments and result, or a dataclass whose fields are checked when it is made.

    Without arrays in its signature, as most are, it is checked only with INFER_TESTS=all: mypy reads it too.
    """
    if isinstance(thing, FunctionType):
        if _has_arrays(thing):
            return _within_a_scope(_typed(thing))
        return _typed(thing) if IS_WHOLE else thing
    if is_dataclass(thing) and isinstance(thing.__init__, FunctionType):
        thing.__init__ = checked(thing.__init__)
    return thing


def _within_a_scope(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function with a check that axes of one name have one length in a call's arguments and result."""

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with jaxtyped("context"):
            return function(*args, **kwargs)

    return call


def _has_arrays(function: FunctionType) -> bool:
    whole = signature(function)
    hints = [parameter.annotation for parameter in whole.parameters.values()]
    return any(_is_of_arrays(hint, function.__globals__) for hint in (*hints, whole.return_annotation))


def _is_of_arrays(hint: Any, names: dict[str, Any]) -> bool:
    """Return True if an array may be part of the type. A name that is not defined yet may be anything."""
    if isinstance(hint, str):
        try:
            hint = eval(hint, names)
        except NameError:
            return True
    if isinstance(hint, type) and issubclass(hint, AbstractArray):
        return True
    parts = hint if isinstance(hint, list) else () if get_origin(hint) is Literal else get_args(hint)
    return any(_is_of_arrays(part, names) for part in parts)
