"""Fixtures of many unit tests. A module that needs another one of the same name defines it."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:  # a file of pure tests must not load torch
    from infer import LLM
    from path_cases import World
    from served import Served


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of random weights, with bytes as tokens."""
    from test_session import make_model

    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def llm(folder: Path) -> "LLM":
    from infer import LLM

    return LLM(folder)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> "World":
    """Engines of a model of random weights, and what the definition answers."""
    from path_cases import make_world

    return make_world("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def served(llm: "LLM") -> "Iterator[Served]":
    from served import serving

    with serving(llm, model="tiny") as served:
        yield served


@pytest.fixture
def quick_interpreter() -> Iterator[None]:
    from quick_interpreter import quick_interpreter  # loads Triton, which there may not be

    with quick_interpreter():
        yield
