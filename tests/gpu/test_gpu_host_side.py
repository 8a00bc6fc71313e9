"""The host's side of CUDA without a GPU: which device is current, which error is raised, how keys are stored."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig

from infer import LLM
from infer.compute import ops
from infer.compute.operands.step import Step
from infer.engine.runner.runner import Runner
from infer.files import open_checkpoint
from infer.files.tensors.lazy_weights import LazyWeights
from infer.models.families import make_architecture
from infer.models.load import load_transformer
from tiny import Tiny, make_tiny

pytest.importorskip("triton", reason="Triton is not installed")

from infer.compute.backends.cuda.graphs import CudaGraphs
from test_families import make_reserved
from test_session import make_model

pytestmark = pytest.mark.usefixtures("quick_interpreter")
SECOND = torch.device("cuda:1")


class Graph:
    """A capture that an error has invalidated. It raises the error of CUDA."""

    def capture_begin(self, pool: object, *arguments: object) -> None:
        assert pool == POOL.id
        assert not POOL.is_used, "a capture takes the pool by itself"

    def capture_end(self) -> None:
        raise RuntimeError("operation failed due to a previous error during capture")


class Pool:
    """A pool of memory, which a capture is given by its id."""

    id, is_used = (1, 2), False

    @contextmanager
    def used(self, pool: object, device: torch.device) -> Iterator[None]:
        assert (pool, device) == (self, SECOND)
        self.is_used = True
        yield
        self.is_used = False


POOL = Pool()


class Stream:
    def __init__(self, device: torch.device) -> None:
        self.device = device

    def wait_stream(self, other: object) -> None:
        return


@pytest.fixture
def current(monkeypatch: pytest.MonkeyPatch) -> list[torch.device]:
    """Return the stack of current devices, on a machine that seems to have two."""
    current = [torch.device("cuda:0")]

    @contextmanager
    def device(chosen: torch.device) -> Iterator[None]:
        current.append(chosen)
        yield
        current.pop()

    fakes: dict[str, Any] = {"device": device, "MemPool": lambda: POOL, "Stream": Stream, "CUDAGraph": Graph}
    fakes |= {"current_stream": Stream, "stream": lambda stream: nullcontext(), "use_mem_pool": POOL.used}
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    return current


def test_an_error_inside_a_capture_is_the_one_that_is_raised(current: list[torch.device]) -> None:
    work = Mock(side_effect=[torch.zeros(1), ValueError("the cause")])
    with pytest.raises(ValueError, match="the cause"):
        CudaGraphs(SECOND).record(work)


def test_a_step_runs_before_its_capture_in_the_memory_of_the_capture(current: list[torch.device]) -> None:
    was_used = list[bool]()

    def work() -> Tensor:
        was_used.append(POOL.is_used)
        return torch.zeros(1)

    with pytest.raises(RuntimeError, match="failed due to a previous error"):
        CudaGraphs(SECOND).record(work)
    assert (was_used, POOL.is_used) == ([True, False], False)


def test_memory_of_the_second_gpu_is_pinned_there(current: list[torch.device], monkeypatch: pytest.MonkeyPatch) -> None:
    pinned, zeros = list[torch.device](), torch.zeros

    def recorded(*sizes: Any, pin_memory: bool = False, **named: Any) -> Tensor:
        if pin_memory:
            pinned.append(current[-1])
        return zeros(*sizes, **named)

    monkeypatch.setattr(torch, "zeros", recorded)
    assert (len(CudaGraphs(SECOND).mirror(8)), pinned, len(current)) == (8, [SECOND], 1)


def test_a_model_on_a_gpu_has_a_fingerprint_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Runner, "warm_up", lambda *_: 0)  # which takes a minute in the interpreter
    folder, found = make_model(tmp_path), list[str]()
    for kernels in ("cpu", "cuda", "cuda", "reference"):
        with ops.using(kernels), LLM(folder, kv_type="f16", max_seq_len=64) as llm:
            found.append(llm.system_fingerprint)
    assert (found[1], len(set(found))) == (found[2], 3)


@torch.inference_mode()
def test_a_model_in_bf16_may_have_keys_that_f16_cannot_hold(tmp_path: Path) -> None:
    sizes = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1}
    config = LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, attention_bias=True)
    oracle = make_tiny(Tiny("bias", config), tmp_path)
    for name, parameter in oracle.named_parameters():
        if name.endswith("k_proj.bias"):
            parameter.fill_(1e5)
    oracle.to(torch.bfloat16).save_pretrained(tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    with ops.using("cuda"):
        backend = ops.backend_of(torch.device("cpu"))
        architecture = make_architecture(checkpoint.config)
        model = load_transformer(architecture, LazyWeights(checkpoint.tensors), backend=backend, dtype=None)
    cache = make_reserved(model)
    for start, ids in ((0, [5, 6, 7]), (3, [8])):
        logits = model.forward(Step.of(ids, start, logit_indices=range(len(ids))), cache)
        cache.commit(0, len(ids))
        assert logits.isfinite().all()


def test_cuda_without_a_number_is_the_first_gpu() -> None:
    """torch refuses to record a step in the memory of a GPU without a number."""
    with ops.using("cuda"):
        assert ops.backend_of(torch.device("cuda")).device == torch.device("cuda", 0)
