"""Rows of the command line: commands, their options and arguments, and the options of other programs.

Each choice of an option is a row too, so a choice that is removed is seen as one.
"""

from collections.abc import Iterator
from typing import Any

import click

from infer.cli.chat_commands import COMMANDS as CHAT_COMMANDS
from infer.cli.option_fields import ALIASES, REPLACED
from infer.cli.subcommands import infer as program

Row = tuple[str, str]


def command_rows() -> Iterator[Row]:
    yield from _rows_of("infer", program)


def chat_rows() -> Iterator[Row]:
    """Yield the commands of a chat at a terminal, with their other names."""
    for command in CHAT_COMMANDS:
        name, *arguments = command.usage.split()
        yield name, " ".join(["command", *arguments])
        for other in command.aliases:
            yield other, f"means {name}"


def alias_rows() -> Iterator[Row]:
    """Yield the options of other programs: those that mean an option of `infer`, and those without effect."""
    yield from ALIASES.items()
    yield from dict.fromkeys(REPLACED, "has no effect").items()


def _rows_of(name: str, command: click.Command) -> Iterator[Row]:
    yield name, "group" if isinstance(command, click.Group) else "command"
    for parameter in command.params:
        if isinstance(parameter, click.Option):
            yield from _rows_of_option(name, parameter)
        else:
            yield f"{name} {_word_of(parameter)}", f"argument, {_value_of(parameter)}"
    if isinstance(command, click.Group):
        for word, inner in command.commands.items():
            yield from _rows_of(f"{name} {word}", inner)


def _rows_of_option(command: str, option: click.Option) -> Iterator[Row]:
    long = next(name for name in option.opts if name.startswith("--"))
    variable = f", ${option.envvar}" if option.envvar else ""
    yield f"{command} {long}", f"{_value_of(option)}{variable}{', hidden' * option.hidden}"
    for other in option.opts:
        if other != long:
            yield f"{command} {other}", f"means {long}"
    for choice in option.type.choices if isinstance(option.type, click.Choice) else ():
        yield f"{command} {long} {choice}", "a choice"
    for other in option.secondary_opts:
        yield f"{command} {other}", f"switches {long} off"


def _word_of(argument: click.Parameter) -> str:
    """Return the word for an argument in the help, without the brackets of an optional one."""
    word = (argument.metavar or argument.name or "").removesuffix("...").upper()
    return word[1:-1] if word.startswith("[") else word


def _value_of(parameter: click.Parameter) -> str:
    """Return the kind of the value, how many there may be, and the default."""
    is_flag = isinstance(parameter, click.Option) and parameter.is_flag
    kind = parameter.type
    words = "flag" if is_flag else kind.name
    if isinstance(kind, click.IntRange | click.FloatRange):
        words += f" from {kind.min}" * (kind.min is not None) + f" to {kind.max}" * (kind.max is not None)
    if parameter.multiple or parameter.nargs != 1:
        words += ", several"
    return words + ", required" * parameter.required + _default_of(parameter.default, is_flag=is_flag)


def _default_of(default: Any, *, is_flag: bool) -> str:
    """Return the default as text. Versions of click differ in how they store that there is none."""
    is_absent = default in (None, ()) or "UNSET" in repr(default) or (is_flag and default is False)
    return "" if is_absent or callable(default) else f", default {default!r}".replace("PosixPath", "Path")
