"""The choice of a GPU, the messages without one, and the steps that CUDA submits ahead.

Fakes replace torch and the device."""

import ctypes
from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor

from commands import run
from infer import load_model
from infer.compute import ops
from infer.compute.backends import gpu_memory, gpus
from infer.compute.backends.before_load import StepSizes
from infer.compute.backends.device_steps import DeviceSteps, Header
from infer.compute.operands.step import Interrupt, Masks, StepEnd
from infer.compute.operands.weights import Projection
from infer.compute.quantization.ggml_types import BLOCK_TYPES
from infer.models.families import make_architecture
from refusals import check_refused
from test_packing import make_weight

HOPPER, PASCAL = ("NVIDIA H200", 9, 0), ("NVIDIA GeForce GTX 1080", 6, 1)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch):
    """Return a function that simulates a machine with these GPUs. Without GPUs, initialising CUDA fails with `why`."""

    def fake(*found: tuple[str, int, int], why: str = "") -> None:
        def init() -> None:
            raise RuntimeError(why)

        made = [SimpleNamespace(name=n, major=major, minor=minor, total_memory=80 << 30) for n, major, minor in found]
        monkeypatch.setattr(torch.version, "cuda", "12.8")
        monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(made))
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(made))
        monkeypatch.setattr(torch.cuda, "get_device_properties", made.__getitem__)
        monkeypatch.setattr(torch.cuda, "init", init)
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    return fake


def test_a_gpu_that_serves_has_no_trouble_and_says_what_it_is(machine) -> None:
    machine(HOPPER)
    assert gpus.trouble_with(None) is None
    assert (str(gpus.visible_gpus()[0]), ops.is_gpu_of_use()) == ("NVIDIA H200, sm_90, 80 GiB", gpus.has_triton())


def test_an_index_that_is_not_there_is_answered_with_those_that_are(machine) -> None:
    machine(HOPPER, PASCAL)
    assert gpus.trouble_with(2) == "there is no cuda:2: cuda:0 is a NVIDIA H200, cuda:1 is a NVIDIA GeForce GTX 1080"


def test_models_lists_every_gpu_as_device_may_name_it(machine) -> None:
    machine(HOPPER, PASCAL)
    told = run("models", "-v").out.splitlines()
    assert "cuda:0: NVIDIA H200, sm_90, 80 GiB" in told
    assert any(line.startswith("cuda:1: NVIDIA GeForce GTX 1080, sm_61, 80 GiB") for line in told)


def test_a_gpu_before_volta_is_refused_by_its_name(machine) -> None:
    machine(PASCAL)
    assert "GTX 1080, sm_61, 80 GiB is too old: the kernels need Volta" in str(gpus.trouble_with(None))
    assert not ops.is_gpu_of_use()


REASONS = [
    ("Found no NVIDIA driver on your system.", "there is no NVIDIA driver here: install one"),
    ("The NVIDIA driver on your system is too old (found version 11040)", "driver is too old for CUDA 12.8"),
    ("something else", "torch sees no CUDA device here"),
]


@pytest.mark.parametrize(("why", "said"), REASONS)
def test_the_reason_for_no_gpu_is_given_with_the_fix(machine, why: str, said: str) -> None:
    machine(why=why)
    assert said in str(gpus.trouble_with(None))
    check_refused(lambda: ops.cuda_backend("cuda"), f"device cuda: .*{said}")


@pytest.mark.parametrize("hidden", ["", "-1"])
def test_a_variable_that_hides_every_gpu_is_named(machine, monkeypatch: pytest.MonkeyPatch, hidden: str) -> None:
    machine()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
    assert f"CUDA_VISIBLE_DEVICES={hidden!r} hides every GPU: unset it" in str(gpus.trouble_with(None))


def test_a_torch_without_cuda_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    assert "built without CUDA: install one for CUDA" in str(gpus.trouble_with(0))


def test_without_triton_plain_torch_runs_with_a_warning(machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine(HOPPER)
    monkeypatch.setattr(gpus, "has_triton", lambda: False)
    with pytest.warns(UserWarning, match="Triton is not installed: plain torch runs on the GPU"):
        assert ops.cuda_backend("cuda").kernels.__name__ == "infer.compute.backends.reference"
    assert not ops.is_gpu_of_use()


def test_auto_is_the_cpu_where_no_gpu_is_of_use(folder) -> None:
    if torch.cuda.is_available():
        pytest.skip("hardware: there is a CUDA GPU")
    assert load_model(folder, device="auto")[0].device.type == "cpu"


def test_free_memory_includes_the_memory_that_torch_holds_unused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1000, 5000))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 300)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 100)
    assert gpus.free_bytes(torch.device("cuda")) == 1200


@pytest.mark.parametrize("type_", sorted(BLOCK_TYPES))
def test_a_matrix_takes_the_memory_of_its_planes(type_: str) -> None:
    cuda = pytest.importorskip("infer.compute.backends.cuda", reason="Triton is not installed")
    for columns in {512, 512 + BLOCK_TYPES[type_].block_size}:
        weight = make_weight(type_, 4, columns, 0, (0.5, -0.37, 1.0, 0.01))
        (packed,) = cuda.prepare(Projection((weight,)), torch.device("cpu")).parts
        assert gpu_memory.matrix_bytes(type_, 4, columns) == packed.num_bytes


def test_a_longer_context_and_more_logits_take_more() -> None:
    config = {"model_type": "llama", "vocab_size": 100, "hidden_size": 64, "intermediate_size": 96}
    config |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    config |= {"rms_norm_eps": 1e-5, "max_position_embeddings": 4096}
    architecture = make_architecture(config)

    def taken(context: int, logits: int) -> int:
        return sum(gpu_memory.workspace_bytes(architecture, {}, StepSizes(context, 8192, logits, "exact", 1), 1))

    assert taken(4096, 1) > taken(1024, 1)
    assert taken(1024, 512) - taken(1024, 64) == 2 * 4 * (512 - 64) * 100, "few lines are used at first"


NUM_ROWS, LAST = 2, 6  # the sixth step is the last one


class Device:
    """A queue that works only when the host waits. Row r of step s gets the token 10 s + r."""

    def __init__(self, group: int, *, interrupted_at: int = 0) -> None:
        self.group, self.interrupt, self.interrupted_at = group, Interrupt(0), interrupted_at
        self.submitted, self.waits, self.words = 0, list[int](), list[int]()
        self.ids = (ctypes.c_int64 * (20 * NUM_ROWS))()

    def enqueue_sampler(self, words: Tensor | None) -> None:
        self.words += [] if words is None else [int(words[0, 0])]
        for row in range(NUM_ROWS):
            self.ids[self.submitted * NUM_ROWS + row] = 10 * self.submitted + row
        self.submitted += 1

    def mark(self) -> Callable[[], bool]:
        done = self.submitted

        def is_over() -> bool:
            self.waits.append(self.submitted - done)
            self.interrupt.value = int(0 < self.interrupted_at <= done)
            return done >= LAST

        return is_over

    def look(self) -> Header:
        return Header(min(self.submitted, LAST), self.submitted >= LAST)

    def run(self, count: int, masks: Masks | None = None) -> tuple[list[list[int]], list[StepEnd]]:
        steps = DeviceSteps(self.group, lambda: None, self.enqueue_sampler, self.mark, self.look, self.ids)
        return steps.run(count, NUM_ROWS, masks, self.interrupt)


def tokens(num_steps: int) -> list[list[int]]:
    return [[10 * step + row for step in range(num_steps)] for row in range(NUM_ROWS)]


@pytest.mark.parametrize("group", [1, 4])
@pytest.mark.parametrize("count", [1, 5, 6, 19])
def test_steps_end_at_the_last_one_with_one_group_submitted_ahead(group: int, count: int) -> None:
    device = Device(group)
    token_ids, steps = device.run(count)
    assert token_ids == tokens(min(count, LAST))
    ends = [end.sampling for end in steps]
    assert (len(ends), ends) == (min(count, LAST), sorted(ends))
    assert set(device.waits) <= set(range(1, group + 1))  # the device always has work
    assert device.submitted <= -(-LAST // group) * group + group


def test_an_interrupt_ends_the_steps_with_those_that_are_submitted() -> None:
    device = Device(1, interrupted_at=2)
    assert (device.run(19)[0], device.submitted) == (tokens(3), 3)


def test_masks_are_awaited_between_the_forward_and_the_sampler_of_each_step() -> None:
    device, calls = Device(4), list[str]()
    words = torch.zeros(NUM_ROWS, 1, dtype=torch.int32)

    def advance(ids: object, count: int, done: int) -> bool:
        calls.append(f"advance {done} of {count}")
        words[0, 0] = done
        return done < 3

    masks = Masks(words, np.ones(1, np.int64), lambda: calls.append("wait"), advance)
    assert device.run(9, masks)[0] == tokens(3)
    assert calls == ["wait", "advance 1 of 9", "wait", "advance 2 of 9", "wait", "advance 3 of 9"]
    assert device.words == [0, 1, 2]
    assert Device(1).run(9, Masks(words, masks.is_ready, masks.wait, lambda *_: True))[0] == tokens(LAST)
