"""A backend: a folder and a line in `ops.device`, torch's threads beside its own, and the limits of its steps.

In threads that generate, torch uses one thread, and afterwards as many as before.
"""

import threading
from collections.abc import Generator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from cases import cases
from demands import Demand, plan_of
from fake_backend import NUM_CALLS, FakeBackend
from infer import LLM, SamplingParams
from infer.cli import main
from infer.compute import ops
from infer.compute.backends.before_load import step_limits
from infer.compute.kvcache.cache_settings import CacheSettings
from infer.compute.operands.limits import GPU_STEP, HOST_STEP, StepLimits
from infer.compute.operands.mixers import Attention
from infer.compute.ops import device
from infer.compute.ops.device import backend_of
from infer.engine.step.scheduler import Scheduler
from infer.files import open_checkpoint
from infer.models.families import make_architecture
from infer.models.memory.memory_budget import MemoryBudget
from infer.models.memory.memory_estimate import LoadSettings, pool_bytes
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


@pytest.fixture
def two_threads() -> Generator[None, None, None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("two_threads")
def test_every_thread_has_its_own_number_again_whichever_ends_last() -> None:
    entered, left = threading.Event(), threading.Event()
    seen = list[int]()

    def other() -> None:
        torch.set_num_threads(2)
        seen.append(torch.get_num_threads())
        with ops.backend_of(CPU).threads():
            seen.append(torch.get_num_threads())
            entered.set()
            left.wait()
        seen.append(torch.get_num_threads())

    thread = threading.Thread(target=other)
    with ops.backend_of(CPU).threads():
        assert torch.get_num_threads() == 1
        with ops.backend_of(CPU).threads():
            assert torch.get_num_threads() == 1
        thread.start()
        entered.wait()
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == 2
    left.set()
    thread.join()
    assert (seen, torch.get_num_threads()) == ([2, 1, 2], 2)


@pytest.mark.usefixtures("two_threads")
def test_a_thread_that_begins_beside_a_generation_keeps_torchs_threads() -> None:
    """Torch itself gives a new thread the number that any thread set last."""
    seen = list[int]()

    def new() -> None:
        with ops.backend_of(CPU).threads():
            seen.append(torch.get_num_threads())
        seen.append(torch.get_num_threads())

    with ops.backend_of(CPU).threads():
        thread = threading.Thread(target=new)
        thread.start()
        thread.join()
    assert seen == [1, 2]


@pytest.mark.usefixtures("two_threads")
def test_an_exception_restores_the_number_of_threads() -> None:
    with pytest.raises(KeyError), ops.backend_of(CPU).threads():
        raise KeyError
    assert torch.get_num_threads() == 2


@pytest.mark.parametrize("name", ["cpu", "cuda", "reference"])
def test_limits_before_the_load_are_those_of_the_backend(name: str) -> None:
    if name == "cuda":
        pytest.importorskip("triton", reason="Triton is not installed")
    with ops.using(name):
        assert step_limits(name) == ops.backend_of(CPU).step_limits
    assert step_limits(f"{name}:1") == step_limits(name)


def test_cpus_and_gpus_have_the_documented_limits() -> None:
    assert StepLimits(512, 64) == HOST_STEP == step_limits("cpu") == step_limits("opencl:Intel")
    assert StepLimits(8192, 512) == GPU_STEP == step_limits("cuda:1")
    assert step_limits("auto") == GPU_STEP, "the range of an option, as the device is not known yet"


@pytest.mark.parametrize(("limits", "chunk", "expected"), [(HOST_STEP, None, 512), (GPU_STEP, None, 8192),
                                                            (GPU_STEP, 700, 700)])  # fmt: skip
def test_a_step_reads_as_much_of_a_prompt_as_the_device_and_the_request_allow(
    limits: StepLimits, chunk: int | None, expected: int
) -> None:
    scheduler = Scheduler(limits)
    plan = plan_of(scheduler, [Demand(20_000)], chunk or limits.tokens)
    assert (plan.num_tokens, scheduler.max_drafts(32)) == ([expected], limits.logits // 32 - 1)


def test_estimates_for_a_gpu_have_its_steps(tmp_path: Any) -> None:
    checkpoint = open_checkpoint(make_model(tmp_path))
    architecture = make_architecture(checkpoint.config)
    on_cpu = LoadSettings(num_threads=1)
    cpu, cuda = (
        MemoryBudget.of(architecture, checkpoint.tensors, load, CacheSettings(), num_tokens=256, num_rows=512).workspace
        for load in (on_cpu, replace(on_cpu, device="cuda"))
    )
    assert cuda > 8 * cpu > 0


def test_a_window_stores_one_step_of_the_device() -> None:
    windowed = Attention(num_heads=1, num_kv_heads=1, head_dim=64, scale=1.0, rope=None, window=1024)
    counts = [
        sum(pool_bytes([windowed], CacheSettings(), "f16", 100_000, 1, None, limits.tokens)) // (64 * 64 * 2 * 2)
        for limits in (HOST_STEP, GPU_STEP)
    ]
    assert counts == [(1024 + 512) // 64 + 1, (1024 + 8192) // 64 + 1]


@pytest.mark.slow(cases=1)
@cases(
    "line message",
    ("serve --slots 65", "--slots must be at most 64 with --device cpu, got 65"),
    ("generate hi --prefill-chunk 513", "--prefill-chunk must be at most 512 with --device cpu, got 513"),
    ("batch in.jsonl out.jsonl --batch-size 65", "--batch-size must be at most 64 with --device cpu, got 65"),
)
def test_the_command_line_has_the_limits_of_the_device(
    line: str, message: str, tmp_path: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*line.split(), "-m", str(make_model(tmp_path))]) == 2
    assert message in capsys.readouterr().err
