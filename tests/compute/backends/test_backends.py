"""A device is a folder and a line in `ops.device`. The tests add one."""

from pathlib import Path

import pytest
import torch

from fake_backend import NUM_CALLS, FakeBackend
from infer import LLM, SamplingParams
from infer.compute import ops
from infer.compute.ops import device
from infer.compute.ops.device import backend_of
from test_session import make_model

CPU = torch.device("cpu")


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(device.MODULE_BY_NAME, "fake", "fake_backend")


@pytest.mark.usefixtures("fake")
def test_a_model_runs_on_a_backend_that_it_has_never_heard_of(tmp_path: Path) -> None:
    folder, params = make_model(tmp_path), SamplingParams(temperature=0, max_new_tokens=12)
    expected = LLM(folder).generate("hello", params)
    with ops.using("fake"):
        assert isinstance(backend_of(CPU), FakeBackend)
        NUM_CALLS.clear()
        llm = LLM(folder)
        found = llm.generate("hello", params, speculation="ngram")
        session = llm.session()
        session.append("hello")
        assert session.generate(params).token_ids == found.token_ids
    assert found.token_ids == expected.token_ids
    assert set(NUM_CALLS) >= {"prepare", "embed", "norm_project", "attend", "project_add", "norm_gate", "head"}


@pytest.mark.usefixtures("fake")
def test_a_model_runs_on_the_backend_that_it_was_loaded_for(tmp_path: Path) -> None:
    with ops.using("fake"):
        llm = LLM(make_model(tmp_path))
    NUM_CALLS.clear()
    llm.generate("hello", SamplingParams(temperature=0, max_new_tokens=2))
    assert isinstance(llm.model.backend, FakeBackend)
    assert set(NUM_CALLS) >= {"embed", "norm_project", "attend", "project_add", "norm_gate", "head", "choose_tokens"}


def test_one_backend_serves_a_device() -> None:
    assert backend_of(CPU) is backend_of(torch.device("cpu"))
    with ops.using("reference"):
        assert backend_of(CPU) is not backend_of(torch.device("meta"))
    assert backend_of(CPU).kernels.__name__ == "infer.compute.backends.cpu.operations"


def test_a_backend_may_lack_optional_parts(tmp_path: Path) -> None:
    """The backend has no captures, compiles nothing and has no threads."""
    with ops.using("reference"):
        backend = backend_of(CPU)
        assert backend.capture(lambda step: step.tokens, 1, 1) is None
        assert backend.kernel_store([]) is None
        assert backend.num_threads() == torch.get_num_threads()
        with backend.threads(), backend.compiling([]):
            memory = backend.zeros((2, 3), torch.float32)
        backend.give_back(memory, 0, 3)
        assert not memory.any()
