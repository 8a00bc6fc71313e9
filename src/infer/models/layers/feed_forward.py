"""Feed-forwards with their weights: norm → gate · up; down → residual stream.

Experts begin with a router: each token has its own experts and the shared one, and their sum is added.
"""

from dataclasses import dataclass, replace
from typing import Self, final

from jaxtyping import Float
from torch import Tensor

from infer.compute import ops
from infer.compute.kvcache.paged import PagedCache
from infer.compute.operands.activation_values import Activations
from infer.compute.operands.architecture import Norms
from infer.compute.operands.feed_forwards import Activation, Dense, Experts
from infer.compute.operands.step import Step
from infer.compute.operands.weights import ExpertNorms, ExpertWeights, Norm, Projection, SharedExpert
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
        gate_up = loader.by_rows(*names, label="gate_up" if dense.is_gated else "up", are_alike=True, are_blocks=True)
        curve = loader.xielu_curve("mlp.act_fn") if dense.activation == "xielu" else None
        return cls(
            norm=loader.norm("mlp_norm") if norms.before and norms.parallel != "one" else None,
            gate_up=replace(gate_up, curve=curve),
            activation=dense.activation,
            down=loader.by_rows("mlp.down_proj", label="down"),
            post_norm=loader.norm("post_mlp_norm", eps=norms.eps_after) if norms.after else None,
            sum_norm=loader.norm("post_mlp_norm") if norms.of_sum else None,
            scale=scale,
            is_gated=dense.is_gated,
        )

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
        matrices, frames = loader.expert_matrices(experts.router.num_experts)
        gate, up, down = (replace(each, used_share=used_share) for each in matrices)
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
            frames=frames,
        )
        return cls(
            norm=loader.norm("mlp_norm") if norms.before else None,
            experts=weights,
            post_norm=loader.norm("post_mlp_norm", eps=norms.eps_after) if norms.after else None,
            scale=scale,
        )

    def add(self, x: Float[Tensor, "tokens hidden"], cache: PagedCache, step: Step) -> Float[Tensor, "tokens hidden"]:
        return ops.add_experts(x, self.norm, self.experts, self.post_norm, self.scale)


def _load_shared(experts: Experts, loader: WeightLoader) -> SharedExpert:
    at = experts.shared_module
    return SharedExpert(
        gate_up=loader.by_rows(
            f"{at}.gate_proj", f"{at}.up_proj", label="shared_gate_up", are_alike=True, are_blocks=True
        ),
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
