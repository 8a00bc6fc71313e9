"""A mixer with a state, with its weights: norm → input; mix with the cache; output → residual stream."""

from dataclasses import dataclass
from typing import Self, final

import torch
from jaxtyping import Float
from torch import Tensor

from infer.compute import ops
from infer.compute.kvcache.paged import PagedCache
from infer.compute.operands.architecture import Norms
from infer.compute.operands.mixers import GatedDeltaNet, Recurrent, ShortConv
from infer.compute.operands.step import Step
from infer.compute.operands.weights import ConvWeights, DeltaNetWeights, Norm, Projection
from infer.models.weight_loader import WeightLoader


@final
@dataclass(frozen=True)
class LoadedRecurrent:
    own: Recurrent
    cache_index: int  # index of the cache's layer with its state
    norm: Norm | None
    input: Projection
    weights: ConvWeights | DeltaNetWeights  # weights between the projections
    output: Projection
    post_norm: Norm | None

    @classmethod
    def load(cls, mixer: Recurrent, norms: Norms, loader: WeightLoader, cache_index: int) -> Self:
        at, parts = ("conv", ["in"]) if isinstance(mixer, ShortConv) else ("linear_attn", list(mixer.projected))
        return cls(
            own=mixer,
            cache_index=cache_index,
            norm=loader.norm("attention_norm") if norms.before else None,
            input=loader.by_rows(*(f"{at}.{part}_proj" for part in parts), label="input"),
            weights=_conv_weights(mixer, loader) if isinstance(mixer, ShortConv) else _delta_net_weights(mixer, loader),
            output=loader.by_rows(f"{at}.out_proj", label="output"),
            post_norm=loader.norm("post_attention_norm", eps=norms.eps_after) if norms.after else None,
        )

    def add(self, x: Float[Tensor, "tokens hidden"], cache: PagedCache, step: Step) -> Float[Tensor, "tokens hidden"]:
        projected = ops.norm_project(x, self.norm, self.input)
        mixed = cache.mix(self.cache_index, projected, self.weights, step)
        return ops.project_add(x, mixed, self.output, self.post_norm)


def _conv_weights(conv: ShortConv, loader: WeightLoader) -> ConvWeights:
    bias = loader.vector("conv.bias") if conv.has_bias else None
    return ConvWeights(loader.vector("conv.taps").T.contiguous(), bias)


def _delta_net_weights(net: GatedDeltaNet, loader: WeightLoader) -> DeltaNetWeights:
    decay = loader.vector("linear_attn.decay")
    return DeltaNetWeights(
        net=net,
        taps=torch.cat([loader.vector(f"linear_attn.{name}") for name in net.taps]).T.contiguous(),
        dt_bias=loader.vector("linear_attn.dt_bias"),
        decay=-decay.exp() if net.is_decay_log else decay,
        norm=loader.norm("linear_attn.norm", eps=net.norm_eps),
    )
