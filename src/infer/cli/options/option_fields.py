"""Options of a command as a frozen dataclass: each field declares the option of the command line that gives it.

`takes_options` adds the options of a class and of its bases to a command, and calls the command with an instance. The
type of a field decides if its option is a flag, a choice, a path or a number, and if it may be repeated. A class may
also have a field `decorators`, which add options that are read in another way.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from inspect import get_annotations
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

import click

from infer.system.byte_size import parse_size
from infer.system.status_line import silence

Options = TypeVar("Options")
Function = TypeVar("Function", bound=Callable[..., Any])
Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]
_DECLARATION = "declaration"


@dataclass
class Invocation:
    """The values that a command passes to `main`."""

    verbose: bool = False
    exit_status: int = 0


def apply_options(options: Sequence[Callable[[Function], Function]], function: Function) -> Function:
    """Decorate a function with options, in the order in which help shows them."""
    for decorate in reversed(options):
        function = decorate(function)
    return function


def option(*flags: str, **settings: Any) -> Any:
    """Declare a field as an option. Without flags, the option has the field's name."""
    return field(metadata={_DECLARATION: (click.option, flags, {"show_default": True, **settings})})


def argument(**settings: Any) -> Any:
    """Declare a field as an argument."""
    return field(metadata={_DECLARATION: (click.argument, (), settings)})


def takes_options(
    kind: type[Options],
) -> Callable[[Callable[[click.Context, Options], int | None]], Callable[..., None]]:
    """Decorate a function that runs a command with an instance of `kind`, and returns the exit status or None."""

    def decorate(run: Callable[[click.Context, Options], int | None]) -> Callable[..., None]:
        def command(**values: Any) -> None:
            context = click.get_current_context()
            invocation = context.ensure_object(Invocation)
            invocation.verbose = values["verbose"]
            silence(values.get("quiet", False))
            context.call_on_close(partial(silence, False))  # only within this command
            known = {each.name: values[each.name] for each in fields(kind)}  # type: ignore[arg-type]
            invocation.exit_status = run(context, kind(**known)) or 0

        command.__name__, command.__doc__ = run.__name__, run.__doc__
        return apply_options(list(_decorators(kind)), command)

    return decorate


def _decorators(kind: type) -> Iterator[Decorator]:
    """Yield click's decorators for a class of options: its own first, then those of its bases."""
    declared = vars(kind).get("__dataclass_fields__", {})
    for name, annotation in get_annotations(kind).items():
        if name in declared and _DECLARATION in declared[name].metadata:
            make, flags, settings = declared[name].metadata[_DECLARATION]
            is_option = make is click.option
            flags = (flags or (f"--{name.replace('_', '-')}",)) if is_option else ()
            yield make(*flags, name, **_settings_of(annotation, is_option=is_option) | settings)
    yield from vars(kind).get("decorators", ())
    for base in kind.__bases__:
        yield from _decorators(base)


def _settings_of(annotation: Any, *, is_option: bool) -> dict[str, Any]:
    """Return click's settings for a field of this type."""
    if get_origin(annotation) in (Union, UnionType):
        (annotation,) = (each for each in get_args(annotation) if each is not NoneType)
    if get_origin(annotation) is Literal:
        return {"type": click.Choice(get_args(annotation))}
    if get_origin(annotation) is tuple:
        return {"multiple": True} if is_option else {"nargs": -1}
    if annotation is bool:
        return {"is_flag": True}
    return {"type": click.Path(path_type=Path) if annotation is Path else annotation}


class ByteSize(click.ParamType):  # type: ignore[type-arg]  # only new versions of click are generic
    """A number of bytes, such as 800MB or 1.5GiB."""

    name = "size"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> int:
        num_bytes = parse_size(str(value))
        if num_bytes is None:
            self.fail(f"{value!r:.40} is not a size: write a number and a unit, such as 800MB or 12GB", param, ctx)
        return num_bytes
