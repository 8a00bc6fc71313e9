"""Real weights and files: where they are, or a skip that says how to get them."""

import shutil
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from assets import asset
from extent import IS_REST, IS_WHOLE
from infer.errors import InvalidRequestError
from infer.files import resolve

if TYPE_CHECKING:  # files without models must not load torch
    from infer import LLM
    from served import Served

# Clients of others, which take seconds to import, and fuzzing. INFER_TESTS=all runs them.
collect_ignore = [] if IS_WHOLE else ["test_agents.py", "test_other_clients.py"]
if find_spec("ray") is None or IS_REST:  # `make ray` installs 660 MB, and runs it
    collect_ignore.append("test_ray.py")


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    try:
        return resolve("smollm2")
    except InvalidRequestError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def served(smollm2_path: Path) -> "Iterator[Served]":
    """Serve SmolLM2 to the clients of a module."""
    from infer import LLM
    from served import serving

    settings: dict[str, Any] = {"model": "smollm2", "model_path": str(smollm2_path), "allow_embeddings": True}
    with LLM(smollm2_path, max_seq_len=1024) as llm, serving(llm, **settings) as served:
        yield served


@pytest.fixture(scope="module")
def llm(served: "Served") -> "LLM":
    return served.state.llm().llm


@pytest.fixture(scope="module")
def expected(llm: "LLM") -> str:
    """Return the library's answer to the first question of clients."""
    question = {"role": "user", "content": "What is the capital of France?"}
    return llm.chat([question], temperature=0, max_new_tokens=24).text


@pytest.fixture
def idle_afterwards(served: "Served") -> Iterator[None]:
    """Wait until nothing of a test's requests is active."""
    from idle import until_idle

    yield
    until_idle(served)


@pytest.fixture(scope="session")
def tokenizers_folder() -> Path:
    return asset("tokenizers")


@pytest.fixture(scope="session")
def node() -> str:
    if (path := shutil.which("node")) is None:
        pytest.skip("node is not installed")
    return path
