"""A gated delta net with its weights: norm → q, k, v, z, b, a; convolve and mix; output → residual stream."""

from dataclasses import dataclass
from typing import Self, final

from jaxtyping import Float
from torch import Tensor

from infer import ops
from infer.kvcache.paged import PagedCache
from infer.model.weight_loader import WeightLoader
from infer.operands.architecture import GatedDeltaNet, Norms
from infer.operands.step import Step
from infer.operands.weights import DeltaNetWeights, Norm, Projection


@final
@dataclass(frozen=True)
class LoadedDeltaNet:
    own: GatedDeltaNet
    cache_index: int  # the cache's layer for its states
    norm: Norm | None
    input: Projection
    mixing: DeltaNetWeights
    output: Projection
    post_norm: Norm | None

    @classmethod
    def load(cls, net: GatedDeltaNet, norms: Norms, loader: WeightLoader, cache_index: int) -> Self:
        decay = loader.vector("linear_attn.decay")
        return cls(
            own=net,
            cache_index=cache_index,
            norm=loader.norm("attention_norm") if norms.before else None,
            input=loader.by_rows(*(f"linear_attn.{which}_proj" for which in ("qkv", "z", "b", "a")), label="delta_in"),
            mixing=DeltaNetWeights(
                net=net,
                taps=loader.vector("linear_attn.taps").T.contiguous(),
                dt_bias=loader.vector("linear_attn.dt_bias"),
                decay=-decay.exp() if net.is_decay_log else decay,
                norm=loader.norm("linear_attn.norm"),
            ),
            output=loader.by_rows("linear_attn.out_proj", label="output"),
            post_norm=loader.norm("post_attention_norm") if norms.after else None,
        )

    @property
    def projections(self) -> tuple[Projection, ...]:
        return self.input, self.output

    def add(self, x: Float[Tensor, "tokens hidden"], cache: PagedCache, step: Step) -> Float[Tensor, "tokens hidden"]:
        projected = ops.norm_project(x, self.norm, self.input)
        mixed = cache.gated_delta_net(self.cache_index, projected, self.mixing, step)
        return ops.project_add(x, mixed, self.output, self.post_norm)
