"""The feed-forwards of layers, which process each token separately, as values: dense, experts, per-layer inputs."""

from dataclasses import dataclass
from typing import Literal

from infer.compute.operands.mixers import Shapes

Activation = Literal["silu", "gelu_tanh", "gelu", "gelu_sigmoid", "relu", "relu_squared", "clamped_swiglu", "xielu"]
XIELU = ("alpha_p", "alpha_n", "beta", "eps")  # the values of this activation, which each layer has of its own
MAX_EXPERTS = 4096  # per layer: each expert has its own tensors
# A table of which a step reads the rows of its tokens. It stays in its file if the device's kernels read files.
PER_LAYER_TABLE = "model.embed_tokens_per_layer.weight"


@dataclass(frozen=True)
class Dense:
    """A feed-forward: down(activation(gate(x)) × up(x)). `clamped_swiglu` is not a factor of up, but changes both.

    Without a gate it is down(activation(up(x))).
    """

    intermediate_size: int
    activation: Activation = "silu"
    has_bias: bool = False
    is_gated: bool = True

    @property
    def widths(self) -> tuple[int, ...]:
        """Values per token of each tensor that ranks of a group gather."""
        return (self.intermediate_size,)

    def shapes(self, hidden: int) -> Shapes:
        """Return the shape of each tensor, by its name within the layer."""
        shapes = _mlp_shapes("mlp", hidden, self.intermediate_size, has_bias=self.has_bias)
        shapes = {name: shape for name, shape in shapes.items() if self.is_gated or "gate_proj" not in name}
        return shapes | ({f"mlp.act_fn.{each}": (1,) for each in XIELU} if self.activation == "xielu" else {})


@dataclass(frozen=True)
class Router:
    """How a token chooses its experts, and how it weighs them. All numbers are float32.

    A token has a score for each expert. It chooses the experts with the highest scores (plus a correction, if there is
    one); if scores are equal, the lower number. The weights of the chosen experts are their scores.
    """

    num_experts: int
    num_chosen: int
    # The last two choose by logits, and are computed from the chosen experts' logits.
    scores: Literal["softmax", "sigmoid", "softmax_of_chosen", "sigmoid_of_chosen"]
    is_normalized: bool = False  # the chosen scores are divided by (their sum + floor)
    floor: float = 0.0
    scale: float = 1.0  # multiplies the weights
    has_bias: bool = False  # the logits have a bias
    has_correction: bool = False  # a correction is added to the scores for the choice, but not for the weights
    has_expert_scales: bool = False  # at the end, each expert's weight is multiplied by a number of the expert
    weighs_inputs: bool = False  # the weights multiply the experts' inputs, not their results

    def shapes(self, hidden: int) -> Shapes:
        shapes: Shapes = {"mlp.router.weight": (self.num_experts, hidden)}
        if self.has_expert_scales:
            shapes["mlp.router.expert_scales"] = (self.num_experts,)
        if self.has_bias:
            shapes["mlp.router.bias"] = (self.num_experts,)
        if self.has_correction:
            shapes["mlp.router.correction"] = (self.num_experts,)
        return shapes


@dataclass(frozen=True)
class Experts:
    """A feed-forward: the weighted sum of the chosen experts' results, plus the result of an expert for all tokens.

    An expert has the form of `Dense`. The matrices of all experts are stacked: expert e has the rows from e × rows on.
    """

    router: Router
    intermediate_size: int  # of each expert
    activation: Activation = "silu"
    has_bias: bool = False
    shared_size: int = 0  # intermediate size of the shared expert; 0: no shared expert
    has_shared_gate: bool = False  # the shared expert's result is multiplied by sigmoid(gate · x)
    # The router and the chosen experts each have a norm before them. Their sum and the shared expert's result each have
    # a norm after them. The norms of the layer are the one before the shared expert, and the one after the sum of
    # everything.
    has_norms: bool = False

    @property
    def shared(self) -> Dense:
        """The shared expert."""
        return Dense(self.shared_size, self.activation, self.has_bias)

    @property
    def shared_module(self) -> str:
        """The beginning of the names of the shared expert's tensors. Some models call them as a layer's MLP."""
        return "mlp" if self.has_norms else "mlp.shared_expert"

    @property
    def widths(self) -> tuple[int, ...]:
        """Values per token of each tensor that ranks of a group gather."""
        return self.router.num_chosen * self.intermediate_size, self.shared_size

    def shapes(self, hidden: int) -> Shapes:
        """Return the shape of each tensor, by its name within the layer."""
        shapes = self.router.shapes(hidden)
        for expert in range(self.router.num_experts):
            shapes |= _mlp_shapes(f"mlp.experts.{expert}", hidden, self.intermediate_size, has_bias=self.has_bias)
        if self.shared_size:
            shapes |= _mlp_shapes(self.shared_module, hidden, self.shared_size, has_bias=self.has_bias)
        if self.has_norms:
            shapes |= {f"mlp.{name}_norm.weight": (hidden,) for name in _EXPERT_NORMS}
        if self.has_shared_gate:
            shapes["mlp.shared_gate.weight"] = (1, hidden)
        return shapes


_EXPERT_NORMS = ("router", "experts", "post_experts", "post_shared")


def _mlp_shapes(at: str, hidden: int, intermediate: int, *, has_bias: bool) -> Shapes:
    shapes: Shapes = {f"{at}.{which}_proj.weight": (intermediate, hidden) for which in ("gate", "up")}
    shapes[f"{at}.down_proj.weight"] = (hidden, intermediate)
    if has_bias:
        shapes |= {f"{at}.{which}_proj.bias": (intermediate,) for which in ("gate", "up")}
        shapes[f"{at}.down_proj.bias"] = (hidden,)
    return shapes


@dataclass(frozen=True)
class PerLayerInput:
    """A part after the feed-forward: norm(projection(activation(gate(x)) × p)), for p of a token and a layer.

    The p of all layers are made before the first layer, from the embeddings x₀ and from a table with one row per token:
    p = (norm(model_projection(x₀)) + √dim × row) / √2, in which each layer has `dim` columns.
    """

    dim: int
    activation: Activation

    @property
    def widths(self) -> tuple[int, ...]:
        """Number of values per token of each tensor that the ranks of a group gather from each other."""
        return (self.dim,)

    def shapes(self, hidden: int) -> Shapes:
        """Return the shape of each tensor, by its name within the layer."""
        shapes: Shapes = {"per_layer_input_gate.weight": (self.dim, hidden)}
        return shapes | {
            "per_layer_projection.weight": (hidden, self.dim),
            "post_per_layer_input_norm.weight": (hidden,),
        }

    def model_shapes(self, hidden: int, vocab: int, num_layers: int) -> Shapes:
        """Return the shape of each tensor that all layers share, by its name."""
        wide = num_layers * self.dim
        return {
            PER_LAYER_TABLE: (vocab, wide),
            "model.per_layer_model_projection.weight": (wide, hidden),
            "model.per_layer_projection_norm.weight": (self.dim,),
        }


FeedForward = Dense | Experts
