"""The choice of a GPU, and the messages without one. Torch is replaced by a fake."""

from types import SimpleNamespace

import pytest
import torch

from commands import run
from infer import load_model
from infer.compute import ops
from infer.compute.backends import gpu_memory, gpus
from infer.compute.backends.before_load import StepSizes
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
    assert str(gpus.visible_gpus()[0]) == "NVIDIA H200, sm_90, 80 GiB"
    assert ops.is_gpu_of_use() == gpus.has_triton()


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
        return gpu_memory.step_bytes(architecture, {}, StepSizes(context, 8192, 512, "exact", 1), logits)

    assert taken(4096, 1) > taken(1024, 1)
    assert taken(1024, 512) - taken(1024, 1) == 2 * 4 * (512 - gpu_memory.FEW_LINES) * 100
