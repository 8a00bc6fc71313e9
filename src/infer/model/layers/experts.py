"""Experts with their weights: norm → router; each token's experts and the shared one; their sum → residual stream."""

from dataclasses import dataclass, replace
from typing import Self, final

from jaxtyping import Float
from torch import Tensor

from infer import ops
from infer.kvcache.paged import PagedCache
from infer.model.weight_loader import WeightLoader
from infer.operands.architecture import Experts, Norms
from infer.operands.step import Step
from infer.operands.weights import ExpertWeights, Norm, Projection, SharedExpert


@final
@dataclass(frozen=True)
class LoadedExperts:
    norm: Norm | None
    experts: ExpertWeights
    post_norm: Norm | None

    @classmethod
    def load(cls, experts: Experts, norms: Norms, loader: WeightLoader) -> Self:
        names = [f"mlp.experts.{expert}" for expert in range(experts.router.num_experts)]
        used_share = experts.router.num_chosen / experts.router.num_experts
        gate, up, down = (
            replace(
                loader.each_by_rows(
                    *(f"{name}.{which}_proj" for name in names), label=which, are_blocks=which != "down"
                ),
                used_share=used_share,
            )
            for which in ("gate", "up", "down")
        )
        weights = ExpertWeights(
            router=experts.router,
            router_logits=loader.float_projection("mlp.router", label="router"),
            correction=loader.vector("mlp.router.correction") if experts.router.has_correction else None,
            gate=gate,
            up=up,
            down=down,
            activation=experts.activation,
            shared=_load_shared(experts, loader) if experts.shared_size else None,
        )
        return cls(
            norm=loader.norm("mlp_norm") if norms.before else None,
            experts=weights,
            post_norm=loader.norm("post_mlp_norm") if norms.after else None,
        )

    @property
    def projections(self) -> tuple[Projection, ...]:
        """The matrices that a token may be multiplied with. Of gate, up and down it needs the chosen experts' rows."""
        own = self.experts
        shared = () if own.shared is None else (own.shared.gate_up, own.shared.down)
        return own.router_logits, own.gate, own.up, own.down, *shared

    def add(self, x: Float[Tensor, "tokens hidden"], cache: PagedCache, step: Step) -> Float[Tensor, "tokens hidden"]:
        return ops.add_experts(x, self.norm, self.experts, self.post_norm)


def _load_shared(experts: Experts, loader: WeightLoader) -> SharedExpert:
    at = "mlp.shared_expert"
    return SharedExpert(
        gate_up=loader.each_by_rows(f"{at}.gate_proj", f"{at}.up_proj", label="shared_gate_up", are_blocks=True),
        down=loader.by_rows(f"{at}.down_proj", label="shared_down"),
        gate=loader.float_projection("mlp.shared_gate", label="shared_gate") if experts.has_shared_gate else None,
    )
