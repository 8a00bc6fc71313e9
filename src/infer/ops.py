"""Every kernel's signature, and the one place that picks an implementation.

The vocabulary is the fused one: a layer is five calls (norm → qkv; rotate, append, attend; output → residual;
norm → gate · up; down → residual), with embed before and head after. `kernels.reference` says in plain torch what
each means; every other kernel module exports the same names and agrees with it.
"""

import ctypes
import math
import mmap
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Literal

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from infer.architecture import Activation
from infer.batch import Step
from infer.kv_blocks import LayerCache
from infer.sampling import sampler
from infer.sampling.history import History
from infer.sampling.rows import Rows
from infer.sampling.sampler import Sampled
from infer.weights import Heads, Norm, OnRead, Projection, Weight

_NO_HUGE_PAGES: int | None = getattr(mmap, "MADV_NOHUGEPAGE", None)  # Linux has it
_REMOVE: int | None = getattr(mmap, "MADV_REMOVE", None)
Precision = Literal["exact", "fast"]

_KV_TYPE_BY_DTYPE = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}
_MODULE_BY_DEVICE = {"cpu": "infer.kernels.cpu", "cuda": "infer.kernels.gpu"}
_forced: ContextVar[str | None] = ContextVar("infer_kernels", default=None)


@dataclass
class _Sharing:
    """How many generations run, and what torch had before the first."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    num_users: int = 0
    num_threads: int = 1


_sharing = _Sharing()


@contextmanager
def using(name: str) -> Iterator[None]:
    """Run with `infer.kernels.<name>` whatever the device: for tests that compare modules."""
    token = _forced.set(f"infer.kernels.{name}")
    try:
        yield
    finally:
        _forced.reset(token)


def kernels(device: torch.device) -> ModuleType:
    """The kernel module that serves a device. On CUDA it is plain torch where Triton is not installed."""
    name = _forced.get()
    if name is None:
        has_kernels = device.type != "cuda" or _has_triton()
        name = _MODULE_BY_DEVICE[device.type] if has_kernels else "infer.kernels.reference"
    return import_module(name)


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None


def prepare(
    projection: Projection,
    device: torch.device,
    precision: Precision = "exact",
    on_read: OnRead = lambda num_bytes: None,
) -> Projection:
    """The projection in the form that the device's kernels read. May repack; values never change.

    `precision` is that of the activations that quantised weights are multiplied with, where kernels have a choice:
    "exact" has 16 bits on the CPU, "fast" 8. `on_read` is told of how many more bytes of the parts were read.
    """
    prepared: Projection = kernels(device).prepare(projection, device, precision, on_read)
    return prepared


def zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeroed memory. On a CPU the system gives its pages when they are first written, and small ones: torch.zeros
    writes them all, and with huge pages the first token takes one for each head of each layer, 240 MB of 30 layers.
    """
    if device.type != "cpu":
        return torch.zeros(tuple(shape), dtype=dtype, device=device)
    num_bytes = math.prod(shape) * dtype.itemsize
    memory = mmap.mmap(-1, max(num_bytes, 1))
    if _NO_HUGE_PAGES is not None:
        memory.madvise(_NO_HUGE_PAGES)
    return torch.from_numpy(np.frombuffer(memory, np.uint8)[:num_bytes]).view(dtype).view(tuple(shape))


def give_back(memory: Tensor, first: int, count: int) -> None:
    """What `zeros` made: entries [first, first + count) of the second axis are not needed, whole pages of the system's
    among them go back to it and are zero when they are next read. Does nothing where the system cannot.
    """
    if memory.device.type != "cpu" or _REMOVE is None:
        return
    for row in memory:
        part = row[first : first + count]
        start = -(-part.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
        end = (part.data_ptr() + part.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
        if start < end:
            ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), _REMOVE)


def set_num_threads(num_threads: int) -> None:
    """How many threads the CPU's kernels run on, from now on."""
    threads = import_module("infer.kernels.cpu.threads")
    threads.set_num_threads(num_threads)


def num_threads(device: torch.device) -> int:
    """How many threads a forward on the device computes with."""
    if not can_capture(device):
        return torch.get_num_threads()
    return int(import_module("infer.kernels.cpu.threads").team().num_threads)


def synchronize(device: torch.device) -> None:
    """Return when what the device was given is done: around timed regions."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def computes_on_host(device: torch.device) -> bool:
    """Whether a forward keeps the cores busy that Python runs on."""
    return device.type == "cpu"


def activation_dtype(device: torch.device, dtype: torch.dtype | None) -> torch.dtype:
    """What a forward computes in, where weights are asked for in `dtype` (None: as they are stored)."""
    return torch.float32 if device.type == "cpu" else dtype or torch.bfloat16


def kv_type(device: torch.device, dtype: torch.dtype | None) -> str:
    """How keys and values are stored where nothing else is asked for: on a CPU in 16 bits, which cost a mean KL of
    less than 1e-6, but whole where all is asked for in float32.
    """
    if device.type == "cpu" and dtype is None:
        return "f16"
    return _KV_TYPE_BY_DTYPE[activation_dtype(device, dtype)]


@contextmanager
def threads_for(device: torch.device) -> Iterator[None]:
    """Around forwards and sampling. torch's threads and our team's spin against each other, which costs tens of
    milliseconds a token: where the team works, torch gets one thread until the last of several users has left.
    """
    if not can_capture(device):
        yield
        return
    with _sharing.lock:
        if _sharing.num_users == 0:
            _sharing.num_threads = torch.get_num_threads()
            torch.set_num_threads(1)
        _sharing.num_users += 1
    try:
        yield
    finally:
        with _sharing.lock:
            _sharing.num_users -= 1
            if _sharing.num_users == 0:
                torch.set_num_threads(_sharing.num_threads)


def can_capture(device: torch.device) -> bool:
    """Whether `capture.cpu` can record what runs on the device."""
    return kernels(device).__name__ == "infer.kernels.cpu"


def embed(table: Weight, token_ids: Int[Tensor, "tokens"], scale: float) -> Float[Tensor, "tokens hidden"]:
    """Rows of the table, times scale."""
    x: Tensor = kernels(token_ids.device).embed(table, token_ids, scale)
    return x


def norm_project(
    x: Float[Tensor, "tokens hidden"], norm: Norm | None, projection: Projection
) -> Float[Tensor, "tokens out"]:
    """project(norm(x))"""
    y: Tensor = kernels(x.device).norm_project(x, norm, projection)
    return y


def attend(
    qkv: Float[Tensor, "tokens out"],
    heads: Heads,
    layer: LayerCache,
    step: Step,
) -> Float[Tensor, "tokens heads_dim"]:
    """softmax(q kᵀ × scale) v over what each token may see, after normalising and rotating q and k.

    qkv is q, k and v side by side. Writes the step's k and v into the cache's layer, at the slot of each token's row
    and position, before reading it. `kv_blocks` says where a slot lies and which of them a token sees.
    """
    y: Tensor = kernels(qkv.device).attend(qkv, heads, layer, step)
    return y


def attention_weights(
    qkv: Float[Tensor, "tokens out"], heads: Heads, layer: LayerCache, step: Step
) -> Float[Tensor, "kv_heads group tokens slots"]:
    """What the tokens of one row look at, behind `attend`: softmax(q kᵀ × scale), for each head of a group."""
    weights: Tensor = kernels(qkv.device).attention_weights(qkv, heads, layer, step)
    return weights


def project_add(
    residual: Float[Tensor, "tokens hidden"],
    x: Float[Tensor, "tokens in"],
    projection: Projection,
    post_norm: Norm | None,
) -> Float[Tensor, "tokens hidden"]:
    """residual + post_norm(project(x)). The result may share residual's memory: do not use residual afterwards."""
    y: Tensor = kernels(x.device).project_add(residual, x, projection, post_norm)
    return y


def norm_gate(
    x: Float[Tensor, "tokens hidden"], norm: Norm | None, gate_up: Projection, activation: Activation
) -> Float[Tensor, "tokens intermediate"]:
    """activation(gate(norm(x))) × up(norm(x)), where the projection's two parts are gate and up."""
    y: Tensor = kernels(x.device).norm_gate(x, norm, gate_up, activation)
    return y


def head(
    x: Float[Tensor, "tokens hidden"],
    wanted: Int[Tensor, "wanted"],
    norm: Norm,
    projection: Projection,
    softcap: float | None = None,
) -> Float[Tensor, "wanted vocab"]:
    """float32 logits of the wanted tokens only: project(norm(x[wanted])), or softcap × tanh(that / softcap)."""
    logits: Tensor = kernels(x.device).head(x, wanted, norm, projection, softcap)
    return logits


def choose_tokens(
    logits: Float[Tensor, "rows vocab"],
    rows: Rows,
    history: History | None,
    positions: Int[Tensor, "rows"],
    allowed: Int[Tensor, "rows words"] | None = None,
) -> Int[Tensor, "rows"]:
    """The token of each row by its parameters, history and noise, or a negative code where the row failed."""
    token_ids: Tensor = kernels(logits.device).choose_tokens(logits, rows, history, positions, allowed)
    return token_ids


def sample(
    logits: Float[Tensor, "rows vocab"],
    rows: Rows,
    history: History | None,
    positions: Int[Tensor, "rows"],
    allowed: Int[Tensor, "rows words"] | None = None,
) -> Sampled:
    """A token a row by the device's own `choose_tokens`, and log-probabilities where asked for: `sampling.sampler`."""
    return sampler.sample(logits, rows, history, positions, allowed, choose=choose_tokens)
