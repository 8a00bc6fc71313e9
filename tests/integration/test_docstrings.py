"""The examples of the public docstrings have the results that they show. They may await, as in `python -m asyncio`."""

import ast
import asyncio
import doctest
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import infer
from infer import LLM

pytestmark = pytest.mark.slow

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
        for member, given in vars(value).items() if inspect.isclass(value) else ():
            function = inspect.unwrap(getattr(given, "__func__", given))
            if inspect.isfunction(function) and not member.startswith("_"):
                yield f"{name}.{member}", function


EXAMPLES = {
    name: doctest.DocTestParser().get_examples(inspect.getdoc(value) or "", name) for name, value in public_objects()
}


def test_each_public_class_and_method_has_an_example() -> None:
    assert {name for name, examples in EXAMPLES.items() if not examples} == FOR_THE_SERVER


@pytest.mark.parametrize("name", [name for name, examples in EXAMPLES.items() if examples])
def test_a_docstring_shows_what_its_example_gives(
    name: str, llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    namespace = {each: getattr(infer, each) for each in infer.__all__}
    namespace |= {"llm": llm, "asyncio": asyncio, "torch": torch, "Path": Path}
    with asyncio.Runner() as runner:
        for example in EXAMPLES[name]:
            if doctest.SKIP in example.options:
                continue
            code = compile(example.source, name, "single", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
            if inspect.iscoroutine(found := eval(code, namespace)):
                runner.run(found)
            assert capsys.readouterr().out == example.want, example.source


@pytest.fixture(scope="module")
def llm(smollm2_path: Path) -> LLM:
    return LLM(smollm2_path)
