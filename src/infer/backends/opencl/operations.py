"""Every op as launches on an OpenCL device: what `backends.reference` defines.

An op makes a few launches (`commands`) and hands them to the active recording, or runs them at once: the same code
either way, so a recorded step gives the same bits.
"""

from dataclasses import replace
from typing import final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from infer.backends import reference
from infer.backends.cpu import packed, sampling
from infer.backends.cpu.isa import instruction_set
from infer.backends.cpu.packed_weight import PackedWeight
from infer.backends.opencl import commands
from infer.backends.opencl.launches import scope
from infer.backends.opencl.memory import storage_of
from infer.backends.opencl.runtime import Runtime
from infer.errors import InvalidRequestError
from infer.operands.architecture import Activation
from infer.operands.step import Step
from infer.operands.weights import Heads, Norm, Projection, Weight
from infer.quantization.kv_layout import LayerCache

_PAIRED = (
    "device opencl: weights are packed for i8mm here, which its kernels do not read: set INFER_ISA=neon, or use "
    "--device cpu"
)


@final
class Operations:
    normalize = staticmethod(reference.normalize)
    choose_tokens = staticmethod(sampling.choose_tokens)  # logits lie in memory that the CPU shares

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime

    def prepare(
        self, projection: Projection, device: torch.device, precision: packed.Precision = "exact"
    ) -> Projection:
        """In the CPU's groups of 16 rows: what is a vector on a CPU is 16 neighbours on a GPU."""
        if instruction_set().inputs != 4:
            raise InvalidRequestError(_PAIRED)
        prepared = packed.prepare(projection, device, precision)
        place = self._runtime.memory.place
        parts = [replace(part, data=place(part.data)) for part in prepared.parts if isinstance(part, PackedWeight)]
        return replace(prepared, parts=tuple(parts))

    def embed(self, table: Weight, token_ids: Int[Tensor, "tokens"], scale: float) -> Float[Tensor, "tokens hidden"]:
        tokens = token_ids.to(torch.int64).contiguous()
        with scope(self._runtime, len(tokens)) as run:
            return commands.embed(run, table, tokens, scale)

    def norm_project(
        self, x: Float[Tensor, "tokens hidden"], norm: Norm | None, projection: Projection
    ) -> Float[Tensor, "tokens out"]:
        with scope(self._runtime, len(x)) as run:
            return commands.norm_project(run, x, norm, projection)

    def attend(
        self, qkv: Float[Tensor, "tokens out"], heads: Heads, layer: LayerCache, step: Step
    ) -> Float[Tensor, "tokens heads_dim"]:
        with scope(self._runtime, len(qkv)) as run:
            return commands.attend(run, qkv, heads, layer, step)

    def attention_weights(
        self, qkv: Float[Tensor, "tokens out"], heads: Heads, layer: LayerCache, step: Step
    ) -> Float[Tensor, "kv_heads group tokens slots"]:
        stored, page_bytes = storage_of(layer.keys), layer.keys.stride(1)
        for page in set(layer.pages.table[step.rows[0]].tolist()):
            self._runtime.memory.to_host(stored, page * page_bytes, page_bytes)
        self._runtime.memory.finish()
        return reference.attention_weights(qkv, heads, layer, step)

    def project_add(
        self,
        residual: Float[Tensor, "tokens hidden"],
        x: Float[Tensor, "tokens in"],
        projection: Projection,
        post_norm: Norm | None,
    ) -> Float[Tensor, "tokens hidden"]:
        with scope(self._runtime, len(x)) as run:
            return commands.project_add(run, residual, x, projection, post_norm)

    def norm_gate(
        self, x: Float[Tensor, "tokens hidden"], norm: Norm | None, gate_up: Projection, activation: Activation
    ) -> Float[Tensor, "tokens intermediate"]:
        with scope(self._runtime, len(x)) as run:
            return commands.norm_gate(run, x, norm, gate_up, activation)

    def head(
        self,
        x: Float[Tensor, "tokens hidden"],
        logit_indices: Int[Tensor, "logits"],
        norm: Norm,
        projection: Projection,
        softcap: float | None = None,
    ) -> Float[Tensor, "logits vocab"]:
        with scope(self._runtime, len(x), len(logit_indices)) as run:
            return commands.head(run, x, logit_indices, norm, projection, softcap)
