"""A dense feed-forward with its weights: norm → gate · up; down → residual stream."""

from dataclasses import dataclass, replace
from typing import Self, final

from jaxtyping import Float
from torch import Tensor

from infer import ops
from infer.kvcache.paged import PagedCache
from infer.model.sharding import row_starts
from infer.model.weight_loader import WeightLoader
from infer.operands.architecture import Activation, Dense, Norms
from infer.operands.group import Shares
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

    @classmethod
    def load(cls, dense: Dense, norms: Norms, loader: WeightLoader) -> Self:
        return cls(
            norm=loader.norm("mlp_norm") if norms.before else None,
            gate_up=_load_gate_up(dense, loader),
            activation=dense.activation,
            down=loader.by_rows("mlp.down_proj", label="down"),
            post_norm=loader.norm("post_mlp_norm") if norms.after else None,
        )

    @property
    def projections(self) -> tuple[Projection, ...]:
        return self.gate_up, self.down

    def add(self, x: Float[Tensor, "tokens hidden"], cache: PagedCache, step: Step) -> Float[Tensor, "tokens hidden"]:
        hidden = ops.norm_gate(x, self.norm, self.gate_up, self.activation)
        return ops.project_add(x, hidden, self.down, self.post_norm)


def _load_gate_up(dense: Dense, loader: WeightLoader) -> Projection:
    names = [f"mlp.{which}_proj" for which in ("gate", "up")]
    if loader.group is None:
        return loader.projection(*names, label="gate_up")
    shares = Shares(loader.group, row_starts(dense.intermediate_size, loader.group.size, are_blocks=True))
    return replace(loader.projection(*names, label="gate_up", ranges=[shares.own] * 2), shares=shares)
