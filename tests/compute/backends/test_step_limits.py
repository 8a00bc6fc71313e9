"""Claims about the limits of a step: each backend has its own, which are known before a model is loaded."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from cases import cases
from infer.cli import main
from infer.compute import ops
from infer.compute.backends.before_load import step_limits
from infer.compute.kvcache.cache_settings import CacheSettings
from infer.compute.operands.limits import GPU_STEP, HOST_STEP, StepLimits
from infer.compute.operands.mixers import Attention
from infer.engine.step.scheduler import Demand, Scheduler
from infer.files import open_checkpoint
from infer.models.families import make_architecture
from infer.models.memory.memory_estimate import LoadSettings, cache_bytes, estimate
from test_session import make_model

CPU = torch.device("cpu")


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
    plan = scheduler.plan([Demand(20_000)], scheduler.step_tokens([None, chunk]))
    assert plan.num_tokens == [expected]
    assert scheduler.max_drafts(32) == limits.logits // 32 - 1


def test_estimates_for_a_gpu_have_its_steps(tmp_path: Any) -> None:
    checkpoint = open_checkpoint(make_model(tmp_path))
    architecture = make_architecture(checkpoint.config)
    on_cpu = LoadSettings(num_threads=1)
    cpu, cuda = (
        estimate(architecture, checkpoint.tensors, load, CacheSettings(), num_tokens=256, num_rows=512).workspace
        for load in (on_cpu, replace(on_cpu, device="cuda"))
    )
    assert cuda > 8 * cpu > 0


def test_a_window_stores_one_step_of_the_device() -> None:
    windowed = Attention(num_heads=1, num_kv_heads=1, head_dim=64, scale=1.0, rope=None, window=1024)
    counts = [
        cache_bytes([windowed], CacheSettings(), "f16", 100_000, 1, None, limits.tokens) // (64 * 64 * 2 * 2)
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
