"""The forward pass: one for prefill, decode and verify, for every family.

Each layer's mixer and feed-forward add to the residual stream. Families differ only in the values of `Architecture`.
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor

from infer.compute import ops
from infer.compute.kvcache.paged import PagedCache
from infer.compute.kvcache.text_cache import TextCache
from infer.compute.operands.architecture import Architecture
from infer.compute.operands.limits import StepLimits
from infer.compute.operands.mixers import Mixer, keeps
from infer.compute.operands.step import Step
from infer.compute.operands.weights import Norm, PerLayerWeights, Projection, TextInputWeights
from infer.models.layers import LoadedAttention, LoadedLayer
from infer.models.layers.extra_inputs import LoadedStateInput


@final
@dataclass(frozen=True)
class Transformer:
    architecture: Architecture
    embedding: Projection
    per_layer: PerLayerWeights | None
    text_inputs: TextInputWeights | None
    layers: tuple[LoadedLayer, ...]
    norm: Norm | None  # None if each layer ends with a norm
    head: Projection  # an encoder has the embedding here, but does not use it as a head
    max_seq_len: int  # positions that the rope tables cover
    step_limits: StepLimits  # the backend's, or less if its memory is small
    backend: ops.Backend
    dtype: torch.dtype  # of the residual stream
    kv_type: str  # default type of stored keys and values
    state_input: LoadedStateInput | None = None  # of a head that drafts for another model
    rope_border: int | None = None  # longer sequences use the second set of rope factors; None: there is only one set
    experts: ops.ExpertStore | None = None  # None: all experts are in memory

    @property
    def device(self) -> torch.device:
        """Device of the model's tensors."""
        return self.backend.device

    @property
    def own_mixers(self) -> list[Mixer]:
        """The mixers of the cache's layers, in order, each with only the heads that this rank of a group has."""
        return [layer.mixer.own for layer in self.layers if layer.mixer is not None and keeps(layer.mixer.own)]

    @property
    def projections(self) -> list[Projection]:
        """The matrices before the head by which every token is multiplied, in order."""
        return list(_projections_in((self.per_layer, self.layers)))

    def is_long(self, length: int) -> bool:
        """Return True if a sequence of `length` tokens uses the second set of rope factors, for all of its tokens."""
        return self.rope_border is not None and length > self.rope_border

    def forward(self, step: Step, cache: PagedCache) -> Float[Tensor, "logits vocab"]:
        """Return float32 logits at `step.logit_indices`, and append the step's keys and values provisionally."""
        return self.logits(self.residual(step, cache), step)

    def logits(self, residual: Float[Tensor, "tokens hidden"], step: Step) -> Float[Tensor, "logits vocab"]:
        """Return float32 logits at `step.logit_indices`, after the last layer."""
        assert self.norm is not None
        with ops.using(self.backend):
            return ops.head(residual, step.logit_indices, self.norm, self.head, self.architecture.logit_softcap)

    def residual(self, step: Step, cache: PagedCache) -> Float[Tensor, "tokens hidden"]:
        """Return the residual stream after the last layer, before the norm and the projection to logits."""
        with ops.using(self.backend):
            step = replace(step)  # nothing that the layers of another forward shared
            x = self._embedded(step) if self.state_input is None else self.state_input.read(step)
            inputs = None if self.per_layer is None else ops.per_layer_inputs(x, step.tokens, self.per_layer)
            for layer in self.layers:
                x = layer.add(x, cache, step)
                if layer.per_layer_input is not None and inputs is not None:
                    x = layer.per_layer_input.add(x, inputs)
            return x

    def _embedded(self, step: Step, cache: TextCache | None = None) -> Float[Tensor, "tokens hidden"]:
        network = self.architecture
        eps = network.norm_eps if network.has_embedding_norm else None
        x = ops.embed(self.embedding.parts[0], step.tokens, network.embedding_scale, eps).to(self.dtype)
        starts = None if cache is None else cache.second_starts
        return x if self.text_inputs is None else ops.add_text_inputs(x, step, starts, self.text_inputs)

    def final_norm(self, residual: Float[Tensor, "tokens hidden"]) -> Float[Tensor, "tokens hidden"]:
        """Return the normalised residual stream, which is the input of the projection to logits."""
        with ops.using(self.backend):
            return residual if self.norm is None else ops.normalize(residual, self.norm)

    # Encoders read whole texts: the cache must have all keys and values before any token of the text attends.

    @property
    def num_stages(self) -> int:
        """Number of stages of an encoder. Each stage is run for all tokens of a text before the next stage."""
        return 1 + len(self.layers)

    def run_stage(
        self, index: int, x: Float[Tensor, "tokens hidden"] | None, step: Step, cache: TextCache
    ) -> Float[Tensor, "tokens hidden"]:
        """Return the residual stream after a stage. x is the stream before it; None for the first, which embeds.

        A stage ends with the next layer's keys and values. x must not be used afterwards.
        """
        with ops.using(self.backend):
            if x is None:
                x = self._embedded(step, cache)
            else:
                for part in self.layers[index - 1].text_parts:
                    x = part.add(x, cache, step)
            if index < len(self.layers):
                mixer = self.layers[index].mixer
                assert isinstance(mixer, LoadedAttention)
                mixer.append_keys(x, cache, step)
            return x


def _projections_in(part: object) -> Iterator[Projection]:
    """Yield the matrices in a value, in the order of its fields."""
    if isinstance(part, Projection):
        yield part
    elif isinstance(part, tuple) or is_dataclass(part):
        values = part if isinstance(part, tuple) else (getattr(part, each.name) for each in fields(part))
        for value in values:
            yield from _projections_in(value)
