"""A dense feed-forward with its weights: norm → gate · up; down → residual stream."""

from dataclasses import dataclass
from typing import Self, final

from jaxtyping import Float
from torch import Tensor

from infer import ops
from infer.kvcache.paged import PagedCache
from infer.model.weight_loader import WeightLoader
from infer.operands.architecture import Activation, Dense, Norms
from infer.operands.step import Step
from infer.operands.weights import Norm, Projection


@final
@dataclass(frozen=True)
class LoadedDense:
    norm: Norm | None
    gate_up: Projection
    activation: Activation
    down: Projection
    post_norm: Norm | None
    scale: float  # multiplies the residual stream after all

    @classmethod
    def load(cls, dense: Dense, norms: Norms, loader: WeightLoader, scale: float) -> Self:
        return cls(
            norm=loader.norm("mlp_norm") if norms.before else None,
            gate_up=loader.each_by_rows("mlp.gate_proj", "mlp.up_proj", label="gate_up", are_blocks=True),
            activation=dense.activation,
            down=loader.by_rows("mlp.down_proj", label="down"),
            post_norm=loader.norm("post_mlp_norm", eps=norms.eps_after) if norms.after else None,
            scale=scale,
        )

    @property
    def projections(self) -> tuple[Projection, ...]:
        return self.gate_up, self.down

    def add(self, x: Float[Tensor, "tokens hidden"], cache: PagedCache, step: Step) -> Float[Tensor, "tokens hidden"]:
        hidden = ops.norm_gate(x, self.norm, self.gate_up, self.activation)
        return ops.project_add(x, hidden, self.down, self.post_norm, self.scale)
