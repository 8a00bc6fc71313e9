"""Signature of every kernel. A model runs its ops `using` its backend; `backend_of` finds the backend of a device.

The ops are fused. A layer is five calls: norm → qkv; rotate, append, attend; output → residual; norm → gate · up; down
→ residual. `embed` is called before the layers, and `head` after them. Per-layer inputs are made once after `embed`,
and a layer uses its own with two more calls. `add_text_inputs` after `embed` is for learned positions, and
`norm_activate` is for feed-forwards without a gate. Encoders have two more ops: `append_keys` of a whole text before
any of its tokens attends, and `project_add_norm` for norms of sums. `backends.reference` defines each op in plain
torch. Every other kernel module exports the same names and agrees with it. An op's input for the next product is
`Activations`: an op accepts only those of the same backend, or floats without a twin.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from infer.compute.backends.base import Backend as Backend
from infer.compute.backends.base import Captured as Captured
from infer.compute.backends.base import ExpertStore as ExpertStore
from infer.compute.backends.base import Generated as Generated
from infer.compute.backends.base import KernelStore as KernelStore
from infer.compute.backends.base import PendingStep as PendingStep
from infer.compute.backends.base import Precision as Precision
from infer.compute.backends.base import Recorded as Recorded
from infer.compute.backends.base import SampledStep as SampledStep
from infer.compute.operands.activation_values import Activations as Activations
from infer.compute.operands.feed_forwards import Activation
from infer.compute.operands.recurrent_cache import ConvCache, DeltaNetCache
from infer.compute.operands.step import Step
from infer.compute.operands.weights import (
    ConvWeights,
    DeltaNetWeights,
    ExpertWeights,
    Heads,
    Norm,
    PerLayerWeights,
    Projection,
    TextInputWeights,
    Weight,
)
from infer.compute.ops.device import backend_named as backend_named
from infer.compute.ops.device import backend_of as backend_of
from infer.compute.ops.device import cuda_backend as cuda_backend
from infer.compute.ops.device import cuda_devices as cuda_devices
from infer.compute.ops.device import is_gpu_of_use as is_gpu_of_use
from infer.compute.ops.device import opencl_devices as opencl_devices
from infer.compute.ops.device import set_num_threads as set_num_threads
from infer.compute.ops.device import using as using
from infer.compute.quantization.kv_layout import LayerCache
from infer.compute.sampling import sampler
from infer.compute.sampling.columns import SamplingColumns
from infer.compute.sampling.history import History
from infer.compute.sampling.sampler import Sampled


def prepare(projection: Projection, device: torch.device, precision: Precision = "exact") -> Projection:
    """Return the projection in the form that the backend's kernels read. May repack; values never change.

    `precision` is the precision of the activations that are multiplied by quantised weights, if the kernels have a
    choice. On the CPU, "exact" has 16 bits and "fast" 8.
    """
    prepared: Projection = backend_of(device).kernels.prepare(projection, device, precision)
    return prepared


def embed(
    table: Weight, token_ids: Int[Tensor, "tokens"], scale: float, norm_eps: float | None = None
) -> Float[Tensor, "tokens hidden"]:
    """Return the tokens' rows of the table, times scale. With `norm_eps`, each has a root mean square of 1."""
    x: Tensor = backend_of(token_ids.device).kernels.embed(table, token_ids, scale, norm_eps)
    return x


def add_text_inputs(
    x: Float[Tensor, "tokens hidden"], step: Step, second_starts: Int[Tensor, "rows"] | None, weights: TextInputWeights
) -> Float[Tensor, "tokens hidden"]:
    """Return norm(x + the token's type + its position). In each row, positions from `second_starts` on have type 1.

    Only types need `second_starts`. The result may share x's memory: do not use x afterwards.
    """
    y: Tensor = backend_of(x.device).kernels.add_text_inputs(x, step, second_starts, weights)
    return y


def norm_project(x: Float[Tensor, "tokens hidden"], norm: Norm | None, projection: Projection) -> Activations:
    """Return project(norm(x))."""
    y: Activations = backend_of(x.device).kernels.norm_project(x, norm, projection)
    return y


def append_keys(kv: Activations, heads: Heads, layer: LayerCache, step: Step) -> None:
    """Write the step's k and v into the cache's layer, like `attend`. The columns of kv are k and v."""
    backend_of(kv.floats.device).kernels.append_keys(kv, heads, layer, step)


def attend(qkv: Activations, heads: Heads, layer: LayerCache, step: Step) -> Activations:
    """Return softmax(q kᵀ × scale) v over the slots that each token may see, after normalising and rotating q and k.

    The columns of qkv are q, k and v. Writes the step's k and v into the cache's layer, at the slot of each token's row
    and position, before reading it. `kv_layout` defines each slot's address and which slots a token sees.
    """
    y: Activations = backend_of(qkv.floats.device).kernels.attend(qkv, heads, layer, step)
    return y


def short_conv(projected: Activations, weights: ConvWeights, layer: ConvCache, step: Step) -> Activations:
    """Return C × conv(B × u). The columns of `projected` are B, C and u; `weights` are the convolution's.

    With n taps, channel c is Σ taps[i, c] × (B × u)[c] of the token n − 1 − i places before, in the order of i. Before
    the first token of a row, B × u is 0. Writes the step's B × u into the cache's layer.
    """
    y: Activations = backend_of(projected.floats.device).kernels.short_conv(projected, weights, layer, step)
    return y


def gated_delta_net(projected: Activations, weights: DeltaNetWeights, layer: DeltaNetCache, step: Step) -> Activations:
    """Return norm(o) × silu(z) of each value head. The columns of `projected` are qkv, z, b and a.

    `GatedDeltaNet` has the equations, and `DeltaNetCache` describes the reads and writes of the cache's layer.
    """
    kernels = backend_of(projected.floats.device).kernels
    y: Activations = kernels.gated_delta_net(projected, weights, layer, step)
    return y


def attention_weights(
    qkv: Float[Tensor, "tokens out"], heads: Heads, layer: LayerCache, step: Step
) -> Float[Tensor, "kv_heads group tokens slots"]:
    """Return the attention weights of one row's tokens, after `attend`.

    They are softmax(q kᵀ × scale), for each head of a group.
    """
    weights: Tensor = backend_of(qkv.device).kernels.attention_weights(qkv, heads, layer, step)
    return weights


def project_add(
    residual: Float[Tensor, "tokens hidden"],
    x: Activations,
    projection: Projection,
    post_norm: Norm | None,
    scale: float = 1.0,
) -> Float[Tensor, "tokens hidden"]:
    """Return (residual + post_norm(project(x))) × scale.

    The result may share residual's memory: do not use residual afterwards.
    """
    y: Tensor = backend_of(x.floats.device).kernels.project_add(residual, x, projection, post_norm, scale)
    return y


def project_add_norm(
    residual: Float[Tensor, "tokens hidden"], x: Activations, projection: Projection, norm: Norm
) -> Float[Tensor, "tokens hidden"]:
    """Return norm(residual + project(x)).

    The result may share residual's memory: do not use residual afterwards.
    """
    y: Tensor = backend_of(x.floats.device).kernels.project_add_norm(residual, x, projection, norm)
    return y


def norm_activate(
    x: Float[Tensor, "tokens hidden"], norm: Norm | None, projection: Projection, activation: Activation
) -> Activations:
    """Return activation(project(norm(x)))."""
    y: Activations = backend_of(x.device).kernels.norm_activate(x, norm, projection, activation)
    return y


def norm_gate(
    x: Float[Tensor, "tokens hidden"], norm: Norm | None, gate_up: Projection, activation: Activation
) -> Activations:
    """Return activation(gate(norm(x))) × up(norm(x)). The projection's two parts are gate and up."""
    y: Activations = backend_of(x.device).kernels.norm_gate(x, norm, gate_up, activation)
    return y


def per_layer_inputs(
    x: Float[Tensor, "tokens hidden"], token_ids: Int[Tensor, "tokens"], weights: PerLayerWeights
) -> Float[Tensor, "tokens inputs"]:
    """Return all layers' inputs of the tokens, as defined by `PerLayerInput`. x is the embeddings."""
    y: Tensor = backend_of(x.device).kernels.per_layer_inputs(x, token_ids, weights)
    return y


def gate_inputs(
    x: Float[Tensor, "tokens hidden"],
    gate: Projection,
    activation: Activation,
    inputs: Float[Tensor, "tokens inputs"],
    first_column: int,
) -> Activations:
    """Return activation(gate(x)) × inputs, with the same number of columns of inputs, from `first_column` on."""
    y: Activations = backend_of(x.device).kernels.gate_inputs(x, gate, activation, inputs, first_column)
    return y


def normalize(x: Float[Tensor, "tokens hidden"], norm: Norm) -> Float[Tensor, "tokens hidden"]:
    """Return norm(x)."""
    y: Tensor = backend_of(x.device).kernels.normalize(x, norm)
    return y


def add_experts(
    residual: Float[Tensor, "tokens hidden"],
    norm: Norm | None,
    experts: ExpertWeights,
    post_norm: Norm | None,
    scale: float = 1.0,
) -> Float[Tensor, "tokens hidden"]:
    """Return (residual + post_norm(Σ weight × expert(x) + shared(x))) × scale for x = norm(residual).

    `Router` defines which experts a token chooses, and their weights. The sum adds the chosen experts in ascending
    order, then the shared expert. With `Experts.has_norms` there are more norms. The result may share residual's
    memory: do not use residual afterwards.
    """
    y: Tensor = backend_of(residual.device).kernels.add_experts(residual, norm, experts, post_norm, scale)
    return y


def head(
    x: Float[Tensor, "tokens hidden"],
    logit_indices: Int[Tensor, "logits"],
    norm: Norm,
    projection: Projection,
    softcap: float | None = None,
) -> Float[Tensor, "logits vocab"]:
    """Return float32 logits of some tokens: project(norm(x[logit_indices])), then softcap × tanh(logits / softcap)."""
    logits: Tensor = backend_of(x.device).kernels.head(x, logit_indices, norm, projection, softcap)
    return logits


def choose_tokens(
    logits: Float[Tensor, "rows vocab"],
    columns: SamplingColumns,
    history: History | None,
    positions: Int[Tensor, "rows"],
    allowed: Int[Tensor, "rows words"] | None = None,
) -> Int[Tensor, "rows"]:
    """Return the token of each row by its parameters, history and noise, or a negative code if the row failed."""
    token_ids: Tensor = backend_of(logits.device).kernels.choose_tokens(logits, columns, history, positions, allowed)
    return token_ids


def sample(
    logits: Float[Tensor, "rows vocab"],
    columns: SamplingColumns,
    history: History | None,
    positions: Int[Tensor, "rows"],
    allowed: Int[Tensor, "rows words"] | None = None,
) -> Sampled:
    """Return one token per row, and log-probabilities for rows that request them.

    The tokens come from the device's own `choose_tokens`; the rest is `sampling.sampler`.
    """
    return sampler.sample(logits, columns, history, positions, allowed, choose=choose_tokens)
