"""Fixtures of many unit tests. A module that needs another one of the same name defines it."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from infer import LLM
from path_cases import World, make_world
from served import Served, serving
from test_session import make_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of random weights, with bytes as tokens."""
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def llm(folder: Path) -> LLM:
    return LLM(folder)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    """Engines of a model of random weights, and what the definition answers."""
    return make_world("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def served(llm: LLM) -> Iterator[Served]:
    with serving(llm, model="tiny") as served:
        yield served


@pytest.fixture
def quick_interpreter() -> Iterator[None]:
    from quick_interpreter import quick_interpreter  # loads Triton, which there may not be

    with quick_interpreter():
        yield
