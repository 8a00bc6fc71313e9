"""The first part of a head that drafts tokens: the embedding of each token, joined with a state of the model.

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
from infer.compute.operands.step import Step
from infer.compute.operands.weights import Norm, Projection
from infer.models.weight_loader import WeightLoader


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
    def load(cls, embedding: Projection, scale: float, num_tokens: int, loader: WeightLoader) -> Self:
        own, device = loader.of_layer(0), loader.backend.device
        return cls(
            embedding=embedding,
            embedding_scale=scale,
            embedding_norm=own.norm("enorm"),
            state_norm=own.norm("hnorm"),
            projection=own.projection("eh_proj", label="join"),
            joined=torch.empty(num_tokens, 2 * loader.hidden_size, device=device),
            stream=torch.empty(num_tokens, loader.hidden_size, device=device),
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
