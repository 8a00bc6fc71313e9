"""Options of a command as a frozen dataclass: each field declares the option of the command line that gives it.

`takes_options` adds the options of a class and of its bases to a command, and calls the command with an instance. The
type of a field decides if its option is a flag, a choice, a path or a number, and if it may be repeated. A class
variable `Group` stands for the options of all settings of a group, which `ModelSettings` and `ServerSettings` declare:
a field `settings_field` has their values. `decorators` add options that are read in another way.

A `TolerantCommand` also accepts the options of other programs under their names.
"""

import difflib
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields
from functools import partial
from inspect import get_annotations
from itertools import islice
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, dataclass_transform, final, get_args, get_origin

import click

from infer.cli.option_files import read_named_file
from infer.model_settings import DEVICE, TEMPLATE
from infer.parameters import Kind, Number, Parameter, Size, Whole, parameters_of
from infer.system.spellings import parse_size
from infer.system.status_line import silence

Options = TypeVar("Options")
Function = TypeVar("Function", bound=Callable[..., Any])
Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]
_DECLARATION, _SETTINGS = "declaration", "settings"
ALIASES = {  # accepted if the command has the option that they mean
    "--max-tokens": "--max-new-tokens",
    "--num-tokens": "--max-new-tokens",
    "--num-predict": "--max-new-tokens",
    "--n-predict": "--max-new-tokens",
    "--max-completion-tokens": "--max-new-tokens",
    "--model-path": "--model",
    "--temp": "--temperature",
    "--repeat-penalty": "--repetition-penalty",
    "--repeat-last-n": "--repetition-window",
    "--ctx-size": "--max-seq-len",
    "--n-ctx": "--max-seq-len",
    "--max-model-len": "--max-seq-len",
    "--system-prompt": "--system",
    "--file": "--prompt-file",
    "--num-threads": "--threads",
}
_DEVICES = re.compile(r"auto|cpu(:\d+)?|cuda(:\d+(,\d+)*)?|opencl(:.*)?", re.DOTALL)
_UNSUPPORTED = {"vulkan": "Vulkan", "metal": "Metal", "mps": "Metal", "rocm": "ROCm"}
REPLACED = {  # flags without effect
    "--zero-copy": "--zero-copy is always on if a device has the host's memory: nothing is copied",
    "--gpu-attn": "--gpu-attn is not needed: attention runs on the model's device (--device)",
}


@dataclass
class Invocation:
    """The value that a command passes to `main`, even if it fails."""

    verbose: bool = False


def apply_options(options: Sequence[Callable[[Function], Function]], function: Function) -> Function:
    """Decorate a function with options, in the order in which help shows them."""
    for decorate in reversed(options):
        function = decorate(function)
    return function


def option(*flags: str, **settings: Any) -> Any:
    """Declare a field as an option of its command. Without flags, it has the field's name. `settings` are click's."""
    return field(metadata={_DECLARATION: (click.option, flags, {"show_default": True, **settings})})


def argument(**settings: Any) -> Any:
    """Declare a field as a positional argument of its command. `settings` are those of `click.argument`."""
    return field(metadata={_DECLARATION: (click.argument, (), settings)})


def settings_field(kind: type[Any]) -> Any:
    """Declare a field with the settings that the groups of `kind` give."""
    return field(metadata={_SETTINGS: kind})


@dataclass_transform(kw_only_default=True, frozen_default=True, field_specifiers=(argument, option, settings_field))
class Declared:
    """The base of the options of commands. Each subclass becomes a frozen dataclass that takes keywords."""

    def __init_subclass__(cls) -> None:
        dataclass(frozen=True, kw_only=True)(cls)


@final
@dataclass(frozen=True)
class Group:
    """The options of the settings of one group, in the order of their declaration by the dataclass `kind`."""

    kind: type[Any]
    name: str

    def options(self) -> Iterator[Decorator]:
        """Yield click's decorators."""
        types, declared_by_name = get_annotations(self.kind), parameters_of(self.kind)
        for each in fields(self.kind):
            declared = declared_by_name.get(each.name)
            if declared is None or declared.group != self.name:
                continue
            name = _option_of(each)
            flags = declared.flags or (f"--{name.replace('_', '-')}",)
            settings = {"help": declared.help or None, "metavar": declared.metavar, "envvar": declared.envvar}
            if not isinstance(each.default, bool) and each.default not in (None, (), MISSING):
                settings["default"] = each.default
            yield click.option(*flags, name, show_default=True, **_type_of(types[each.name], each, declared) | settings)


def make_options(kind: type[Options], values: Mapping[str, Any]) -> Options:
    """Return the options of a command with the values of its command line. Raises InvalidRequestError."""
    kinds = {each.name: each.metadata.get(_SETTINGS) for each in fields(kind)}  # type: ignore[arg-type]
    own = {name: values[name] for name, declared in kinds.items() if declared is None}
    others = {name: value for name, value in values.items() if name not in own}
    return kind(**own, **{name: declared(**_given(declared, others)) for name, declared in kinds.items() if declared})


def _given(kind: type[Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of those settings whose options a command has."""
    options = {each.name: _option_of(each) for each in fields(kind)}
    given = {name: values[option] for name, option in options.items() if option in values}
    return {name: value if options[name] == name else not value for name, value in given.items()}


def takes_options(
    kind: type[Options],
) -> Callable[[Callable[[click.Context, Options], int | None]], Callable[..., int]]:
    """Decorate a function that runs a command with an instance of `kind`, and returns the exit status or None.

    The command's help is the function's docstring, or that of `kind`.
    """

    def decorate(run: Callable[[click.Context, Options], int | None]) -> Callable[..., int]:
        def command(**values: Any) -> int:
            context = click.get_current_context()
            context.ensure_object(Invocation).verbose = values["verbose"]
            silence(values.get("quiet", False))
            context.call_on_close(partial(silence, False))  # only within this command
            return run(context, make_options(kind, values)) or 0

        command.__name__, command.__doc__ = run.__name__, run.__doc__ or kind.__doc__
        return apply_options(list(decorators_of(kind)), command)

    return decorate


def decorators_of(kind: type) -> Iterator[Decorator]:
    """Yield click's decorators for a class of options: its own first, then those of its bases."""
    declared = vars(kind).get("__dataclass_fields__", {})
    for name, annotation in get_annotations(kind).items():
        if isinstance(group := vars(kind).get(name), Group):
            yield from group.options()
        elif name in declared and _DECLARATION in declared[name].metadata:
            make, flags, settings = declared[name].metadata[_DECLARATION]
            is_option = make is click.option
            flags = (flags or (f"--{name.replace('_', '-')}",)) if is_option else ()
            yield make(*flags, name, **_settings_of(annotation, is_option=is_option) | settings)
    yield from vars(kind).get("decorators", ())
    for base in kind.__bases__:
        yield from decorators_of(base)


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


def _option_of(setting: Field[Any]) -> str:
    """Return the name of a setting's option. A setting that is on by default has an option that switches it off."""
    return f"no_{setting.name}" if setting.default is True else setting.name


def _type_of(annotation: Any, setting: Field[Any], declared: Parameter) -> dict[str, Any]:
    """Return click's settings for the values of a setting."""
    match declared.kind:
        case Whole(least=least, most=most, is_range=True):
            return {"type": click.IntRange(least, most)}
        case Number(least=least):
            return {"type": click.FloatRange(least)}
    return _TYPE_BY_KIND.get(declared.kind) or _settings_of(annotation, is_option=True)


def size(value: object) -> int:
    """Return a number of bytes, such as 800MB or 1.5GiB."""
    num_bytes = parse_size(str(value))
    if num_bytes is None:
        raise click.BadParameter(f"{value!r:.40} is not a size: write a number and a unit, such as 800MB or 12GB")
    return num_bytes


def device(value: object) -> str:
    """Return auto, cpu, cuda, cuda:N, cuda:N,N, opencl or opencl:NAME. The error for another name lists the kinds."""
    if _DEVICES.fullmatch(str(value)):
        return str(value)
    kind = str(value).partition(":")[0].lower()
    fix = f": {_UNSUPPORTED[kind]} is not supported" if kind in _UNSUPPORTED else ""
    fix = ": a GPU is named cuda" if kind == "gpu" else fix
    raise click.BadParameter(f"{value!r} is not one of 'auto', 'cpu', 'cuda', 'opencl'{fix}")


def what_to_type(word: str, commands: Collection[str]) -> str:
    """Return the message for an unknown first word."""
    near = difflib.get_close_matches(word.lower(), commands, n=1)
    if near:
        return f"no such command {word!r}: did you mean {near[0]!r}?"
    from infer.files.hub.find import INSTALLED_MODELS

    if word in INSTALLED_MODELS or "/" in word or word.lower().endswith(".gguf"):
        return f"no such command {word!r:.200}; to name a model: infer chat {word:.200}"
    if " " in word:
        return f'no such command {word!r:.60}; to give a prompt: infer generate "TEXT"'
    return f"no such command {word!r:.200}: use one of {', '.join(sorted(commands))}"


class TolerantCommand(click.Command):
    """A command that also accepts option names of other programs, and several words after `--choice`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        known = {name for option in self.params for name in (*option.opts, *option.secondary_opts)}
        return super().parse_args(ctx, list(_spelled(args, known)))


def _spelled(arguments: Sequence[str], known: Collection[str]) -> Iterator[str]:
    """Yield the arguments under the names that the command knows.

    `--choice A B` becomes `--choice A --choice B`, up to the next option.
    """
    end, may_be_choice = arguments.index("--") if "--" in arguments else len(arguments), False
    is_quiet = "-q" in arguments or "--quiet" in arguments
    words = iter(arguments[:end])
    for word in words:
        name, equals, value = word.partition("=")
        if not word.startswith("-") or word == "-":
            yield from ("--choice", word) if may_be_choice else (word,)
            continue
        may_be_choice = name == "--choice" and name in known
        if name in known or (name not in REPLACED and ALIASES.get(name) not in known):
            yield word
        elif name in REPLACED:
            if not is_quiet:
                click.echo(f"infer: {REPLACED[name]}", err=True)
        else:
            yield ALIASES[name] + equals + value
        if may_be_choice and not equals:
            yield from islice(words, 1)
    yield from arguments[end:]


_TYPE_BY_KIND: Mapping[Kind, dict[str, Any]] = {
    DEVICE: {"type": device},
    Size(): {"type": size},
    TEMPLATE: {"type": click.Path(path_type=Path), "callback": read_named_file},
}
