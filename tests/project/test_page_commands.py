"""Commands on the pages: each names a command and options that exist, with values that the command line accepts."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from infer.cli.options.other_programs import ALIASES
from infer.cli.subcommands import infer

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted(page for page in (ROOT / "docs").rglob("*.md") if page.name != "log.md")]
FENCE = re.compile(r"^```\w*\n(.*?)^```$", re.DOTALL | re.MULTILINE)
INLINE = re.compile(r"`([^`]+)`")
# A prompt, variables, other programs or the path of a virtual environment may precede a command.
COMMAND = re.compile(r"(?:^|[|&;] ?|\$ |RUN |/bin/|=\S* |--list \S+ )(infer (?:'[^']*'|\"[^\"]*\"|[^#|&<\n'\"])*)")
COMMENT = re.compile(r"\s#\s")
CONTAINER = re.compile(r"^docker run .* infer( [^#\n]*)?$", re.MULTILINE)
VALUES = {"N": "2", "T": "q8", "P": "sliding"}  # values of options that a sentence names by a letter


def commands_in_blocks(page: Path) -> Iterator[str]:
    for block in FENCE.findall(page.read_text(encoding="utf-8")):
        joined = block.replace("\\\n", " ")
        for line in joined.splitlines():
            yield from COMMAND.findall(COMMENT.split(line)[0])
        for options in CONTAINER.findall(joined):
            yield f"infer serve{options}"


def commands_in_sentences(page: Path) -> Iterator[str]:
    """Yield the commands that sentences and tables name, which may leave arguments out."""
    for code in INLINE.findall(FENCE.sub("", page.read_text(encoding="utf-8"))):
        if re.match(r"infer [a-z]", code) and "\n" not in code and "…" not in code:
            yield code


def parse(command: str) -> None:
    """Parse a command and run nothing. Raises click's error if it would be refused."""
    name, *rest = [VALUES.get(word, word) for word in shlex.split(command)[1:]]
    if not name.startswith("-"):
        with click.Context(infer).scope():
            infer.commands[name].make_context(name, rest)


def named_options(command: str) -> set[str]:
    return {word.partition("=")[0] for word in command.split() if re.match(r"--?[a-z]", word)}


@pytest.mark.parametrize("page", PAGES, ids=[page.relative_to(ROOT).as_posix() for page in PAGES])
def test_infer_accepts_each_command_of_a_page(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "person.json").write_text("{}")
    for command in commands_in_blocks(page):
        try:
            parse(command)
        except (click.ClickException, KeyError) as error:
            pytest.fail(f"{command}: {error}")
    for command in commands_in_sentences(page):
        name = command.split()[1]
        options = {each for option in infer.commands[name].params for each in (*option.opts, *option.secondary_opts)}
        accepted = options | set(ALIASES) | {"--help", "-h"}
        assert named_options(command) <= accepted, command


def test_the_pages_have_commands_to_check() -> None:
    names = [command.split()[1] for page in PAGES for command in commands_in_blocks(page)]
    assert len(names) > 60
    assert {"batch", "chat", "doctor", "estimate", "generate", "quantize", "serve"} <= set(names)
