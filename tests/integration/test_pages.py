"""Pages and docstrings show the output of their commands and their Python to the letter, but for times and speeds.

The examples of a page run in order in one folder. "Save it as `NAME`:" before a block, or `$ cat NAME`, is a file.
The Python of a tutorial runs in one namespace. A block without a language after it is its output.
"""

import ast
import asyncio
import doctest
import inspect
import re
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

import infer
from infer.cli import main, model_loading
from infer.cli.command_options import BatchOptions, LoadOptions
from infer.cli.model_loading import load_model
from infer.llm import LLM

ROOT = Path(__file__).parents[2]
TUTORIALS = [ROOT / "docs" / "tutorial.md", *sorted((ROOT / "docs" / "tutorials").glob("*.md"))]
_HOW_TO = ROOT / "docs" / "how-to"
COMMANDS = [_HOW_TO / name for name in ("command-line.md", "examine-files.md", "judge-models.md", "quantize.md")]
PAGES = [*TUTORIALS, ROOT / "README.md", *COMMANDS]
MEASURED = re.compile(r"[\d,]+(?:\.\d+)? (?:ms|s|tokens/sec|rows/s|tok/s)\b")
BLOCK = re.compile(r"(?:as `(?P<file>[\w.-]+)`[^\n]*:\n\n)?^```(?P<language>\w*)\n(?P<text>.*?)^```$", re.S | re.M)


class Example(NamedTuple):
    kind: str  # "file", "command" or "python"
    source: str
    output: str = ""
    name: str = ""


def examples_of(page: Path) -> Iterator[Example]:
    """Yield the files of a page, its commands with an output, and a tutorial's Python, in their order."""
    blocks = list(BLOCK.finditer(page.read_text(encoding="utf-8")))
    for block, after in zip(blocks, [*blocks[1:], None], strict=True):
        prompts = re.split(r"^\$ (.*)\n", block["text"], flags=re.MULTILINE)[1:]
        shown = [*zip(prompts[::2], prompts[1::2], strict=True)]
        if block["file"]:
            yield Example("file", block["text"], name=block["file"])
        elif block["language"] == "python" and page in TUTORIALS:
            is_output = after and not after["language"] and "$ " not in after["text"] and _adjoin(block, after)
            yield Example("python", block["text"], after["text"] if after and is_output else "")
        for command, output in shown:
            words = shlex.split(command, comments=True)
            if words[0] == "cat":
                yield Example("file", output, name=words[1])
            elif words[0] == "infer" and output:
                yield Example("command", command, output)


def _adjoin(block: re.Match[str], after: re.Match[str]) -> bool:
    return not block.string[block.end() : after.start()].strip()


def input_files(command: str) -> set[str]:
    """Return the names of the files that a command reads."""
    words = shlex.split(command, comments=True)
    named = {words[i + 1] for i, word in enumerate(words) if word in ("--prompt-file", "--json-schema", "-f")}
    inputs = words[:-1] if words[1] == "batch" else words
    return named | {word for word in inputs if word.endswith((".gguf", ".jsonl"))}


def lines_of(text: str) -> list[str]:
    return [MEASURED.sub("#", line.rstrip()) for line in text.strip("\n").splitlines()]


@pytest.mark.slow(cases=1)
@pytest.mark.parametrize("page", PAGES, ids=[page.stem for page in PAGES])
def test_a_page_shows_what_its_examples_print(
    page: Path, llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shared: Callable[..., LLM] = lambda model, **settings: LLM(model, **settings) if settings else llm  # noqa: E731
    monkeypatch.setattr(model_loading, "load_model", lambda given: load_model(given) if needs_own_model(given) else llm)
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, Any] = {"__name__": "__page__"}
    num_run = 0
    for kind, source, output, name in examples_of(page):
        capsys.readouterr()
        if kind == "file":
            (tmp_path / name).write_text(source)
        elif kind == "python":
            with monkeypatch.context() as patched:
                patched.setattr(infer, "LLM", shared, raising=False)
                exec(compile(source, page.name, "exec"), namespace)
            num_run += 1
            if output:
                assert lines_of(capsys.readouterr().out) == lines_of(output), source
        elif all((tmp_path / each).exists() for each in input_files(source)):
            main(shlex.split(source, comments=True)[1:])
            printed, num_run = capsys.readouterr(), num_run + 1
            assert lines_of(printed.out or printed.err) == lines_of(output), source
    assert num_run or page.name in {"README.md", "editors-and-agents.md", "judge-models.md", "quantize.md"}


def needs_own_model(options: LoadOptions) -> bool:
    """Return True if a command has unusual settings, or closes its model."""
    own = options.settings.kv_type, options.settings.eviction_policy, options.settings.max_seq_len
    return isinstance(options, BatchOptions) or own != ("auto", "none", None)


@pytest.fixture(scope="module")
def llm(smollm2_path: Path) -> LLM:
    return LLM(smollm2_path)


# Docstrings. Their examples may await, as in `python -m asyncio`.

# The server calls these methods. Programs have better ones.
FOR_THE_SERVER = {
    *("AsyncLLM.compute_vectors", "AsyncLLM.compute_labels", "AsyncLLM.score_pairs", "AsyncLLM.trace_answer"),
    "AsyncStream.of",
}


def public_objects() -> Iterator[tuple[str, Any]]:
    """Yield each exported name and each public method of an exported class, with its object."""
    for name in infer.__all__:
        value = getattr(infer, name)
        yield name, value
        for member, given in inspect.getmembers_static(value) if inspect.isclass(value) else ():
            function = inspect.unwrap(getattr(given, "__func__", given))
            if inspect.isfunction(function) and not member.startswith("_"):
                yield f"{name}.{member}", function


EXAMPLES_IN = doctest.DocTestParser().get_examples
DOCSTRINGS = {name: EXAMPLES_IN(inspect.getdoc(value) or "", name) for name, value in public_objects()}


def test_each_public_class_and_method_has_an_example() -> None:
    assert {name for name, examples in DOCSTRINGS.items() if not examples} == FOR_THE_SERVER


@pytest.mark.parametrize("name", [name for name, examples in DOCSTRINGS.items() if examples])
def test_a_docstring_shows_what_its_example_gives(
    name: str, llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    namespace = {each: getattr(infer, each) for each in infer.__all__}
    namespace |= {"llm": llm, "asyncio": asyncio, "torch": torch, "Path": Path}
    with asyncio.Runner() as runner:
        for example in DOCSTRINGS[name]:
            if doctest.SKIP in example.options:
                continue
            code = compile(example.source, name, "single", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
            if inspect.iscoroutine(found := eval(code, namespace)):
                runner.run(found)
            assert capsys.readouterr().out == example.want, example.source
