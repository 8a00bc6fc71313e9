"""Experts with their weights: norm → router; each token's experts and the shared one; sum → residual stream."""

from dataclasses import dataclass, replace
from typing import Self, final

from jaxtyping import Float
from torch import Tensor

from infer.compute import ops
from infer.compute.kvcache.paged import PagedCache
from infer.compute.operands.architecture import Norms
from infer.compute.operands.feed_forwards import Experts
from infer.compute.operands.step import Step
from infer.compute.operands.weights import ExpertNorms, ExpertWeights, Norm, Projection, SharedExpert
from infer.models.weight_loader import EXPERT_PARTS, ExpertMatrices, WeightLoader


@final
@dataclass(frozen=True)
class LoadedExperts:
    norm: Norm | None
    experts: ExpertWeights
    post_norm: Norm | None
    scale: float  # multiplies the residual stream at the end

    @classmethod
    def load(cls, experts: Experts, norms: Norms, loader: WeightLoader, scale: float) -> Self:
        used_share = experts.router.num_chosen / experts.router.num_experts
        matrices = _load_matrices(experts.router.num_experts, loader)
        gate, up, down = (replace(each, used_share=used_share) for each in matrices[:3])
        router_logits = loader.projection("mlp.router", label="router")
        weights = ExpertWeights(
            router=experts.router,
            router_logits=router_logits,
            correction=loader.vector("mlp.router.correction") if experts.router.has_correction else None,
            gate=gate,
            up=up,
            down=down,
            activation=experts.activation,
            shared=_load_shared(experts, loader) if experts.shared_size else None,
            expert_scales=loader.vector("mlp.router.expert_scales") if experts.router.has_expert_scales else None,
            norms=_load_norms(loader, router_logits.in_features) if experts.has_norms else None,
            frames=matrices.frames,
        )
        return cls(
            norm=loader.norm("mlp_norm") if norms.before else None,
            experts=weights,
            post_norm=loader.norm("post_mlp_norm", eps=norms.eps_after) if norms.after else None,
            scale=scale,
        )

    @property
    def projections(self) -> tuple[Projection, ...]:
        """The matrices by which a token may be multiplied. Of gate, up and down, it needs the chosen experts' rows."""
        own = self.experts
        shared = () if own.shared is None else (own.shared.gate_up, own.shared.down)
        return own.router_logits, own.gate, own.up, own.down, *shared

    def add(self, x: Float[Tensor, "tokens hidden"], cache: PagedCache, step: Step) -> Float[Tensor, "tokens hidden"]:
        return ops.add_experts(x, self.norm, self.experts, self.post_norm, self.scale)


def _load_matrices(num_experts: int, loader: WeightLoader) -> ExpertMatrices:
    """Return gate, up and down of all experts, and their frames if they are read from a file."""
    if loader.experts is not None:
        return loader.expert_records(num_experts)
    gate, up, down = (
        loader.each_by_rows(
            *(f"mlp.experts.{expert}.{part}_proj" for expert in range(num_experts)),
            label=part, are_blocks=part != "down", is_stack=True,
        )
        for part in EXPERT_PARTS
    )  # fmt: skip
    return ExpertMatrices(gate, up, down)


def _load_shared(experts: Experts, loader: WeightLoader) -> SharedExpert:
    at = experts.shared_module
    return SharedExpert(
        gate_up=loader.each_by_rows(f"{at}.gate_proj", f"{at}.up_proj", label="shared_gate_up", are_blocks=True),
        down=loader.by_rows(f"{at}.down_proj", label="shared_down"),
        gate=loader.projection("mlp.shared_gate", label="shared_gate") if experts.has_shared_gate else None,
    )


def _load_norms(loader: WeightLoader, hidden: int) -> ExpertNorms:
    return ExpertNorms(
        router=loader.norm("mlp.router_norm", hidden**-0.5),
        experts=loader.norm("mlp.experts_norm"),
        post_experts=loader.norm("mlp.post_experts_norm"),
        post_shared=loader.norm("mlp.post_shared_norm"),
    )
