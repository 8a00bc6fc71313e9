"""Every op as compiled commands for the CPU: what `backends.reference` defines, at the speed of memory.

An op makes a few commands (`commands`) and hands them to the active recording, or runs them at once as a table of
their own: the same code either way, so a recorded step gives the same bits.
"""

from jaxtyping import Float, Int
from torch import Tensor

from infer.backends.cpu import commands
from infer.backends.cpu.packed import prepare
from infer.backends.cpu.recording import scope
from infer.backends.cpu.sampling import choose_tokens
from infer.backends.reference import attention_weights, normalize
from infer.operands.architecture import Activation
from infer.operands.step import Step
from infer.operands.weights import Heads, Norm, Projection, Weight
from infer.quantization.kv_layout import LayerCache

__all__ = [
    "attend",
    "attention_weights",
    "choose_tokens",
    "embed",
    "head",
    "norm_gate",
    "norm_project",
    "normalize",
    "prepare",
    "project_add",
]


def embed(table: Weight, token_ids: Int[Tensor, "tokens"], scale: float) -> Float[Tensor, "tokens hidden"]:
    with scope("embed", tokens=token_ids) as run:
        return commands.embed(run, table, scale)


def norm_project(
    x: Float[Tensor, "tokens hidden"], norm: Norm | None, projection: Projection
) -> Float[Tensor, "tokens out"]:
    with scope("qkv", num_tokens=len(x)) as run:
        return commands.norm_project(run, x, norm, projection)


def attend(
    qkv: Float[Tensor, "tokens out"],
    heads: Heads,
    layer: LayerCache,
    step: Step,
) -> Float[Tensor, "tokens heads_dim"]:
    with scope("attend", step=step) as run:
        return commands.attend(run, qkv, heads, layer)


def project_add(
    residual: Float[Tensor, "tokens hidden"],
    x: Float[Tensor, "tokens in"],
    projection: Projection,
    post_norm: Norm | None,
) -> Float[Tensor, "tokens hidden"]:
    with scope("project", num_tokens=len(x)) as run:
        return commands.project_add(run, residual, x, projection, post_norm)


def norm_gate(
    x: Float[Tensor, "tokens hidden"], norm: Norm | None, gate_up: Projection, activation: Activation
) -> Float[Tensor, "tokens intermediate"]:
    with scope("gate_up", num_tokens=len(x)) as run:
        return commands.norm_gate(run, x, norm, gate_up, activation)


def head(
    x: Float[Tensor, "tokens hidden"],
    logit_indices: Int[Tensor, "logits"],
    norm: Norm,
    projection: Projection,
    softcap: float | None = None,
) -> Float[Tensor, "logits vocab"]:
    with scope("head", num_tokens=len(x), logit_indices=logit_indices) as run:
        return commands.head(run, x, norm, projection, softcap)
