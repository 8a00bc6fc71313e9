"""Inputs of the residual stream beside the embedding: a token's own input for each layer, and a state of another model.

The first kind is gate × input; projection → residual stream.

A head of multi-token prediction (arXiv:2412.19437, section 2.2) reads token i and the model's state h of token i − 1,
after the last norm. Its residual stream begins with W · [norm(embedding of token i), norm(h)]; then one layer follows.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self, final

import torch
from jaxtyping import Float
from torch import Tensor

from infer.compute import ops
from infer.compute.operands.activation_values import Activations
from infer.compute.operands.feed_forwards import PER_LAYER_TABLE, Activation, PerLayerInput
from infer.compute.operands.step import Step
from infer.compute.operands.weights import Norm, PerLayerWeights, Projection
from infer.models.weight_loader import WeightLoader


@final
@dataclass(frozen=True)
class LoadedPerLayerInput:
    gate: Projection
    activation: Activation
    first_column: int  # first column of this layer's inputs
    output: Projection
    post_norm: Norm
    scale: float  # multiplies the residual stream at the end

    @classmethod
    def load(cls, own: PerLayerInput, index: int, loader: WeightLoader, scale: float) -> Self:
        return cls(
            gate=loader.by_rows("per_layer_input_gate", label="input_gate"),
            activation=own.activation,
            first_column=index * own.dim,
            output=loader.by_rows("per_layer_projection", label="input_output"),
            post_norm=loader.norm("post_per_layer_input_norm"),
            scale=scale,
        )

    def add(
        self, x: Float[Tensor, "tokens hidden"], inputs: Float[Tensor, "tokens inputs"]
    ) -> Float[Tensor, "tokens hidden"]:
        """Return the residual stream x with the part's result added. `inputs` has the inputs of all layers."""
        gated = ops.gate_inputs(x, self.gate, self.activation, inputs, self.first_column)
        return ops.project_add(x, gated, self.output, self.post_norm, self.scale)


def load_per_layer_weights(loader: WeightLoader) -> PerLayerWeights | None:
    """Return the weights that all layers share, if the network has such inputs.

    Both parts of the sum are divided by √2. The norm of a sum that is divided by √hidden has an eps that is larger by
    the same factor.
    """
    if (own := loader.network.per_layer_input) is None:
        return None
    norm = loader.norm("model.per_layer_projection_norm", 0.5**0.5)
    return PerLayerWeights(
        table=loader.table(PER_LAYER_TABLE.removesuffix(".weight")),
        table_scale=(own.dim / 2) ** 0.5,
        projection=loader.projection("model.per_layer_model_projection", label="per_layer_inputs"),
        norm=Norm(norm.weight, norm.eps * loader.network.hidden_size),
    )


@final
@dataclass(frozen=True)
class LoadedStateInput:
    embedding: Projection
    embedding_scale: float
    embedding_norm: Norm
    state_norm: Norm
    projection: Projection
    joined: Float[Tensor, "tokens both"]  # a recorded step reads it, so it must be written before the step
    stream: Float[Tensor, "tokens hidden"]

    @classmethod
    def load(cls, embedding: Projection, num_tokens: int, loader: WeightLoader) -> Self:
        own, device, hidden = loader.of_layer(0), loader.backend.device, loader.network.hidden_size
        return cls(
            embedding=embedding,
            embedding_scale=loader.network.embedding_scale,
            embedding_norm=own.norm("enorm"),
            state_norm=own.norm("hnorm"),
            projection=own.projection("eh_proj", label="join"),
            joined=torch.empty(num_tokens, 2 * hidden, device=device),
            stream=torch.empty(num_tokens, hidden, device=device),
        )

    def write(self, token_ids: Sequence[int], states: Float[Tensor, "tokens hidden"]) -> None:
        """Set the inputs of the next step: its tokens, and the model's state before each of them."""
        ids = torch.tensor(token_ids, device=states.device)
        embedded = ops.embed(self.embedding.parts[0], ids, self.embedding_scale).float()
        both = ops.normalize(embedded, self.embedding_norm), ops.normalize(states, self.state_norm)
        self.joined[: len(ids)] = torch.cat(both, dim=1)
        self.stream[: len(ids)] = 0

    def read(self, step: Step) -> Float[Tensor, "tokens hidden"]:
        """Return the residual stream before the layer."""
        count = len(step.tokens)
        return ops.project_add(self.stream[:count], Activations(self.joined[:count]), self.projection, None)
