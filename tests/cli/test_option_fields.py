"""Claims about the options of commands: a field declares an option, and its type defines the option's values."""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, ClassVar, Literal

import click
import pytest
from click.testing import CliRunner

from infer.cli.options.option_fields import Invocation, argument, option, takes_options
from infer.cli.subcommands import infer


@dataclass(frozen=True)
class Shared:
    size: int = option(default=3, help="Its size.")
    verbose: bool = option("-v", "--verbose")


@dataclass(frozen=True)
class Own(Shared):
    decorators: ClassVar[Any] = (click.option("--temperature", type=float, default=0.5),)
    words: tuple[str, ...] = argument()
    kind: Literal["round", "square"] | None = option()
    tags: tuple[str, ...] = option("--tag")
    where: Path | None = option()
    temperature: float


taken: list[Own] = []


@click.command()
@takes_options(Own)
def command(context: click.Context, options: Own) -> int:
    """Take options."""
    taken.append(options)
    return len(options.words)


def given(*arguments: str) -> tuple[Own, int]:
    invocation = Invocation()
    result = CliRunner().invoke(command, arguments, obj=invocation, standalone_mode=False)
    assert result.exception is None, result.output
    return taken[-1], invocation.exit_status


def test_the_type_of_a_field_decides_what_its_option_takes() -> None:
    assert given() == (Own(3, False, (), None, (), None, 0.5), 0)
    line = "a b --kind round --tag x --tag y --where /tmp --size 4 -v --temperature 1"
    assert given(*line.split()) == (Own(4, True, ("a", "b"), "round", ("x", "y"), Path("/tmp"), 1.0), 2)
    for wrong in ("--kind oval", "--size many"):
        with pytest.raises(click.BadParameter):
            command.main(wrong.split(), standalone_mode=False)


def test_help_shows_the_options_of_a_class_before_those_of_its_bases() -> None:
    shown = CliRunner().invoke(command, ["--help"]).output
    places = [shown.index(name) for name in ("[WORDS]", "--kind", "--tag", "--where", "--temperature", "--size")]
    assert places == sorted(places)
    assert "Its size.  [default: 3]" in shown


def test_no_command_declares_an_option_twice() -> None:
    for each in infer.commands.values():
        names = [name for parameter in each.params for name in (*parameter.opts, *parameter.secondary_opts)]
        assert len(names) == len(set(names)), each.name
    assert len(fields(Own)) == 7
