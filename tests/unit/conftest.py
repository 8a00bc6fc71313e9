"""What many unit tests begin with; a module that needs another of the same name defines it."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
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
def quick_interpreter(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Triton's interpreter prepares the language anew at each call of a device function, half of its time: once a
    launch is enough, for kernels and the language's own functions alike. NumPy's warnings of arithmetic with infinities
    mean nothing to a kernel."""
    import triton.language as tl
    from triton.runtime import interpreter

    prepare, is_prepared = interpreter._patch_lang, [False]
    whole_language = SimpleNamespace(__globals__={"tl": tl, "core": tl.core})

    def prepare_once(function: Any) -> Any:
        if is_prepared[0]:
            return None
        scope = prepare(whole_language)
        restore, is_prepared[0] = scope.restore, True

        def restore_all() -> None:
            is_prepared[0] = False
            restore()

        scope.restore = restore_all
        return scope

    monkeypatch.setattr(interpreter, "_patch_lang", prepare_once)
    with np.errstate(all="ignore"):
        yield
