"""A short convolution with its weights: norm → B, C, u; C × conv(B × u); output → residual stream."""

from dataclasses import dataclass
from typing import Self, final

from jaxtyping import Float
from torch import Tensor

from infer import ops
from infer.kvcache.paged import PagedCache
from infer.model.weight_loader import WeightLoader
from infer.operands.architecture import Norms, ShortConv
from infer.operands.step import Step
from infer.operands.weights import ConvWeights, Norm, Projection


@final
@dataclass(frozen=True)
class LoadedShortConv:
    own: ShortConv
    cache_index: int  # the cache's layer for its inputs
    norm: Norm | None
    input: Projection
    conv: ConvWeights
    output: Projection
    post_norm: Norm | None

    @classmethod
    def load(cls, conv: ShortConv, norms: Norms, loader: WeightLoader, cache_index: int) -> Self:
        return cls(
            own=conv,
            cache_index=cache_index,
            norm=loader.norm("attention_norm") if norms.before else None,
            input=loader.by_rows("conv.in_proj", label="conv_in"),
            conv=ConvWeights(
                taps=loader.vector("conv.taps").T.contiguous(),
                bias=loader.vector("conv.bias") if conv.has_bias else None,
            ),
            output=loader.by_rows("conv.out_proj", label="output"),
            post_norm=loader.norm("post_attention_norm") if norms.after else None,
        )

    @property
    def projections(self) -> tuple[Projection, ...]:
        return self.input, self.output

    def add(self, x: Float[Tensor, "tokens hidden"], cache: PagedCache, step: Step) -> Float[Tensor, "tokens hidden"]:
        projected = ops.norm_project(x, self.norm, self.input)
        mixed = cache.short_conv(self.cache_index, projected, self.conv, step)
        return ops.project_add(x, mixed, self.output, self.post_norm)
