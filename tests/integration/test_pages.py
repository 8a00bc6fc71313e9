"""The pages show what a command prints under `$ infer …`: to the letter, but for times and speeds."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from infer.cli import main, subcommands
from infer.llm import LLM

ROOT = Path(__file__).parents[2]
PAGES = [(ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "docs/command-line.md")]
MEASURED = re.compile(r"[\d,]+(?:\.\d+)? (?:ms|s|tokens/sec)\b")


class Shown(NamedTuple):
    command: str
    output: tuple[str, ...]


def blocks() -> Iterator[list[Shown]]:
    text = "\n".join(PAGES)
    for _, block in re.findall(r"^```(\w*)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE):
        parts = re.split(r"^\$ (.*)\n", block, flags=re.MULTILINE)[1:]
        if parts:
            yield [Shown(parts[i], tuple(parts[i + 1].splitlines())) for i in range(0, len(parts), 2)]


def commands_that_can_run() -> Iterator[tuple[dict[str, str], Shown]]:
    """Yield the commands that show an output and name only files whose text is shown before, with these files."""
    for block in blocks():
        files: dict[str, str] = {}
        for shown in block:
            words = shlex.split(shown.command)
            named = [words[i + 1] for i, word in enumerate(words) if word in ("--prompt-file", "--json-schema", "-f")]
            named += [word for word in words if word.endswith(".gguf")]
            if words[0] == "cat":
                files[words[1]] = "\n".join(shown.output) + "\n"
            elif words[0] == "infer" and shown.output and set(named) <= files.keys():
                yield dict(files), shown


RUN = list(commands_that_can_run())


def test_the_pages_show_outputs() -> None:
    assert len(RUN) >= 4


@pytest.mark.parametrize(("files", "shown"), RUN, ids=[shown.command[:50] for _, shown in RUN])
def test_a_page_shows_what_the_command_prints(
    files: dict[str, str],
    shown: Shown,
    llm: LLM,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(subcommands, "load_model", lambda options: llm)
    monkeypatch.chdir(tmp_path)
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    main(shlex.split(shown.command)[1:])
    printed = capsys.readouterr()
    lines = (printed.out or printed.err).splitlines()
    assert [MEASURED.sub("#", line) for line in lines] == [MEASURED.sub("#", line) for line in shown.output]


@pytest.fixture(scope="module")
def llm(smollm2_path: Path) -> LLM:
    return LLM(smollm2_path)
