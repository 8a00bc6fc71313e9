"""Servers of the tests of a module, which says what is special about them: `MODEL`, `LOADED` and `SERVED`."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from infer import LLM
from served import Served, serving


@pytest.fixture(scope="module")
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a Llama with random weights, made with the arguments `MODEL` of the module."""
    from test_session import make_model

    return make_model(tmp_path_factory.mktemp("model"), **getattr(request.module, "MODEL", {}))


@pytest.fixture(scope="module")
def llm(request: pytest.FixtureRequest, folder: Path) -> Iterator[LLM]:
    """Return the model of the folder, loaded with the arguments `LOADED` of the module."""
    with LLM(folder, **getattr(request.module, "LOADED", {})) as llm:
        yield llm


@pytest.fixture(scope="module")
def served(request: pytest.FixtureRequest, folder: Path, llm: LLM) -> Iterator[Served]:
    """Serve the model with the settings `SERVED` of the module."""
    with serving(llm, **{"model": "tiny", "model_path": str(folder)} | getattr(request.module, "SERVED", {})) as served:
        yield served
