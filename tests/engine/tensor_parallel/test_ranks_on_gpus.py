"""Ranks on GPUs: their kernels, in Triton's interpreter and over gloo, have the bits of one rank; lists are checked."""

import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import distributed

from extent import IS_WHOLE
from infer import LLM
from infer.cli import main
from infer.compute import ops
from infer.compute.backends import gpus
from infer.engine.tensor_parallel import ranks as ranks_module
from infer.engine.tensor_parallel.ranks import ModelSource, TorchGroup, rank_devices
from infer.errors import InferError, InvalidRequestError
from infer.model_settings import ModelSettings
from infer.models.families import make_architecture
from infer.models.sharding import check_even_heads
from test_tensor_parallel import check_same, ranks_of, runner_of, steps
from tiny import TINY, make_tiny

pytest.importorskip("triton", reason="Triton is not installed")
sys.path.append(str(Path(__file__).parents[3] / "benchmarks"))

from gpu_ranks import check_ranks
from random_weights import write_gguf
from refusals import check_refused

CONFIG = {
    "model_type": "llama", "vocab_size": 512, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 1,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "rms_norm_eps": 1e-5, "rope_theta": 1e4,
    "max_position_embeddings": 256,
}  # fmt: skip


@pytest.fixture
def on_gpus(quick_interpreter: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let this process and its ranks use the kernels for GPUs."""
    monkeypatch.setattr(ranks_module, "PROGRAM", (str(Path(__file__).with_name("cuda_follower.py")),))
    monkeypatch.delenv("INFER_POISON")  # NaN would differ in the compared blocks
    with ops.using("cuda"):
        yield


def check_same_bits(path: Path, size: int, captures: tuple[bool, ...] = (True,)) -> None:
    expected = steps(runner_of(path), 2)
    ranks = ranks_of(path, size, "gloo")
    try:
        for capture in captures:
            runner = runner_of(path, ranks, capture=capture)
            assert runner.model.backend.kernels.__name__ == "infer.compute.backends.cuda"
            check_same(runner, expected)
    finally:
        ranks.close()


@pytest.mark.slow(rest=0)
@pytest.mark.parametrize("name", ["qwen2_moe", "gemma2", "olmo2", "Q4_K", "F16", "BF16"][: 6 if IS_WHOLE else 1])
def test_two_ranks_have_the_bits_of_one(name: str, tmp_path: Path, on_gpus: None) -> None:
    """Experts, norms after products, norms over all heads, which each rank has; and types. Q4_K also runs op by op."""
    if name.islower():
        make_tiny(next(tiny for tiny in TINY if tiny.name == name), tmp_path)
    else:
        write_gguf(tmp_path / "model.gguf", CONFIG, 1, name, CONFIG["vocab_size"])
    check_same_bits(tmp_path if name.islower() else tmp_path / "model.gguf", 2, (True, False)[: 1 + (name == "Q4_K")])


@pytest.mark.slow(rest=0)
def test_check_gpu_finds_the_tokens_of_one_rank(tmp_path: Path, on_gpus: None) -> None:
    config = CONFIG | dict.fromkeys(("hidden_size", "intermediate_size", "vocab_size"), 128) | {"head_dim": 32}
    write_gguf(tmp_path / "model.gguf", config, 1, "Q4_0", 128)
    found = list(check_ranks(tmp_path / "model.gguf", ("cpu", "cpu"), "gloo", 2))
    assert [each["op"] for each in found] == ["2 ranks, recorded", "2 ranks, op by op"]
    assert all(each["is_right"] for each in found)


@pytest.mark.parametrize(("device", "num_ranks", "expected"), [
    ("cpu", 1, ("cpu",)), ("cpu", 2, ("cpu", "cpu")), ("auto", 1, ("auto",)), ("cuda:1", 1, ("cuda:1",)),
    ("cuda:0,1", 1, ("cuda:0", "cuda:1")), ("cuda:3,1,2", 3, ("cuda:3", "cuda:1", "cuda:2")),
])  # fmt: skip
def test_each_gpu_of_a_list_has_a_rank(device: str, num_ranks: int, expected: tuple[str, ...]) -> None:
    assert rank_devices(device, num_ranks) == expected


@pytest.mark.parametrize(("settings", "problem"), [
    ({"device": "cuda:0,0"}, "device cuda:0,0 names cuda:0 twice: name each GPU once"),
    ({"device": "cuda:0,1,01"}, "names cuda:1 twice"),
    ({"device": "cuda:0,x"}, "device must list GPUs by number, as in cuda:0,1, got 'cuda:0,x'"),
    ({"device": "cuda:0,"}, "must list GPUs by number"),
    ({"device": "cuda:0,1", "tensor_parallel": 3}, "contradict each other: leave tensor_parallel out"),
    ({"tensor_parallel": 0}, "tensor_parallel must be a whole number from 1, got 0"),
    ({"device": "cuda", "tensor_parallel": 2}, "needs device cpu or a list of GPUs such as cuda:0,1, got 'cuda'"),
    ({"device": "cuda:0,7"}, "device cuda:7: there is no cuda:7: cuda:0 is a NVIDIA H200"),
    ({"device": "cuda:0,1,2"}, "3 GPUs cannot have equal shares of 4 heads with 2 heads of keys"),
    ({"tensor_parallel": 2, "memory_threshold_mb": 1, "eviction_policy": "sliding"}, "would evict at different"),
    ({"device": "cuda:0,1", "memory_threshold_mb": 1, "eviction_policy": "sliding"}, "would evict at different"),
])  # fmt: skip
def test_a_wrong_list_is_refused_in_one_line(
    settings: dict[str, Any], problem: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = [gpus.Gpu(index, "NVIDIA H200", (9, 0), 141 << 30) for index in range(3)]
    monkeypatch.setattr(gpus, "visible_gpus", lambda: made)
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(distributed, "is_nccl_available", lambda: True)
    check_refused(lambda: LLM(folder, **settings), re.escape(problem))


def test_gpus_that_nothing_connects_are_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "trouble_with", lambda index: None)
    monkeypatch.setattr(distributed, "is_nccl_available", lambda: False)
    check_refused(lambda: LLM(folder, device="cuda:0,1"), r"^devices cuda:0, cuda:1: this torch has no NCCL")


def test_the_command_line_takes_a_list(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "-m", str(folder), "abc", "--device", "cuda:1,1"]) == 2
    assert "device cuda:1,1 names cuda:1 twice: name each GPU once" in capsys.readouterr().err


@pytest.mark.parametrize(("num_heads", "kv_heads", "even"), [
    (32, 8, (1, 2, 4, 8, 16, 32)), (32, 32, (1, 2, 4, 8, 16, 32)), (12, 2, (1, 2, 4, 6, 12)), (9, 3, (1, 3, 9)),
])  # fmt: skip
def test_heads_are_divided_evenly_or_each_rank_has_all(num_heads: int, kv_heads: int, even: tuple[int, ...]) -> None:
    config = CONFIG | {"num_attention_heads": num_heads, "num_key_value_heads": kv_heads}
    architecture, refused = make_architecture(config), set[int]()
    for num_ranks in range(1, num_heads + 1):
        try:
            check_even_heads(architecture, num_ranks)
        except InvalidRequestError:
            refused.add(num_ranks)
    assert refused.isdisjoint(even)
    assert {each for each in range(1, kv_heads + 1) if kv_heads % each} <= refused


class FakeNccl:
    """NCCL of one rank, whose gathers return the same columns for each rank."""

    def __init__(self, store: object, rank: int, size: int, timeout: object) -> None:
        self.size, self.is_aborted = size, False

    def _allgather_base(self, parts: torch.Tensor, own: torch.Tensor) -> Any:
        parts.copy_(torch.cat([own] * self.size))
        return SimpleNamespace(wait=lambda: None)

    def abort(self) -> None:
        self.is_aborted = True


def test_gpus_are_connected_by_nccl_which_is_aborted_at_an_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = list[FakeNccl]()
    make: Callable[..., FakeNccl] = lambda *arguments: made.append(FakeNccl(*arguments)) or made[-1]  # noqa: E731
    monkeypatch.setattr(distributed, "ProcessGroupNCCL", make, raising=False)
    group = TorchGroup(1, 2, tmp_path / "meeting", "nccl")
    own = torch.arange(6.0).view(2, 3)
    assert torch.equal(group.gather(own[:, :2], [3, 2]), torch.cat([own[:, :2], torch.zeros(2, 1), own[:, :2]], 1))
    assert group.gather(own[:0], [3, 2]).shape == (0, 5)
    assert not made[0].is_aborted
    group.fail()
    assert made[0].is_aborted
    check_refused(group.begin_anew, "load again", InferError)


def test_each_rank_loads_on_its_own_device() -> None:
    source = ModelSource(Path("m"), "f", ModelSettings(), 1, ("cuda:2", "cuda:0"))
    assert [source.device_of(rank) for rank in range(2)] == ["cuda:2", "cuda:0"]
    assert source._replace(devices=()).device_of(1) == "cpu"
