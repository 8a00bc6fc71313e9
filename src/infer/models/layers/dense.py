"""A dense feed-forward with its weights: norm → gate · up; down → residual stream."""

from dataclasses import dataclass
from typing import Self, final

from jaxtyping import Float
from torch import Tensor

from infer.compute import ops
from infer.compute.operands.activation_values import Activations
from infer.compute.operands.architecture import Norms
from infer.compute.operands.feed_forwards import Activation, Dense
from infer.compute.operands.step import Step
from infer.compute.operands.weights import Norm, Projection
from infer.models.layers.attention import AnyCache
from infer.models.weight_loader import WeightLoader


@final
@dataclass(frozen=True)
class LoadedDense:
    norm: Norm | None
    gate_up: Projection  # only up, if there is no gate
    activation: Activation
    down: Projection
    post_norm: Norm | None
    sum_norm: Norm | None
    scale: float  # multiplies the residual stream at the end
    is_gated: bool

    @classmethod
    def load(cls, dense: Dense, norms: Norms, loader: WeightLoader, scale: float) -> Self:
        names = ("mlp.gate_proj", "mlp.up_proj") if dense.is_gated else ("mlp.up_proj",)
        return cls(
            norm=loader.norm("mlp_norm") if norms.before and norms.parallel != "one" else None,
            gate_up=loader.each_by_rows(*names, label="gate_up" if dense.is_gated else "up", are_blocks=True),
            activation=dense.activation,
            down=loader.by_rows("mlp.down_proj", label="down"),
            post_norm=loader.norm("post_mlp_norm", eps=norms.eps_after) if norms.after else None,
            sum_norm=loader.norm("post_mlp_norm") if norms.of_sum else None,
            scale=scale,
            is_gated=dense.is_gated,
        )

    @property
    def projections(self) -> tuple[Projection, ...]:
        return self.gate_up, self.down

    def add(self, x: Float[Tensor, "tokens hidden"], cache: AnyCache, step: Step) -> Float[Tensor, "tokens hidden"]:
        return self.add_down(x, self.hidden(x))

    def hidden(self, x: Float[Tensor, "tokens hidden"]) -> Activations:
        """Return the activations before the last product, `[tokens, inner]`."""
        first = ops.norm_gate if self.is_gated else ops.norm_activate
        return first(x, self.norm, self.gate_up, self.activation)

    def add_down(self, x: Float[Tensor, "tokens hidden"], hidden: Activations) -> Float[Tensor, "tokens hidden"]:
        """Return the residual stream x with the last product of `hidden` added."""
        if self.sum_norm is not None:
            return ops.project_add_norm(x, hidden, self.down, self.sum_norm)
        return ops.project_add(x, hidden, self.down, self.post_norm, self.scale)
