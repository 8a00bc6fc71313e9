"""The input of a token for each layer, with its weights: gate × input; projection → residual stream."""

from dataclasses import dataclass
from typing import Self, final

from jaxtyping import Float
from torch import Tensor

from infer.compute import ops
from infer.compute.operands.feed_forwards import PER_LAYER_TABLE, Activation, PerLayerInput
from infer.compute.operands.weights import Norm, PerLayerWeights, Projection
from infer.models.weight_loader import WeightLoader


@final
@dataclass(frozen=True)
class LoadedPerLayerInput:
    gate: Projection
    activation: Activation
    first_column: int  # first column of this layer's inputs
    output: Projection
    post_norm: Norm
    scale: float  # multiplies the residual stream at the end

    @classmethod
    def load(cls, own: PerLayerInput, index: int, loader: WeightLoader, scale: float) -> Self:
        return cls(
            gate=loader.by_rows("per_layer_input_gate", label="input_gate"),
            activation=own.activation,
            first_column=index * own.dim,
            output=loader.by_rows("per_layer_projection", label="input_output"),
            post_norm=loader.norm("post_per_layer_input_norm"),
            scale=scale,
        )

    @property
    def projections(self) -> tuple[Projection, ...]:
        return self.gate, self.output

    def add(
        self, x: Float[Tensor, "tokens hidden"], inputs: Float[Tensor, "tokens inputs"]
    ) -> Float[Tensor, "tokens hidden"]:
        """Return the residual stream x with the part's result added. `inputs` has the inputs of all layers."""
        gated = ops.gate_inputs(x, self.gate, self.activation, inputs, self.first_column)
        return ops.project_add(x, gated, self.output, self.post_norm, self.scale)


def load_per_layer_weights(own: PerLayerInput, hidden: int, loader: WeightLoader) -> PerLayerWeights:
    """Return the weights that all layers share.

    Both parts of the sum are divided by √2. The norm of a sum that is divided by √hidden has an eps that is larger by
    the same factor.
    """
    norm = loader.norm("model.per_layer_projection_norm", 0.5**0.5)
    return PerLayerWeights(
        table=loader.table(PER_LAYER_TABLE.removesuffix(".weight")),
        table_scale=(own.dim / 2) ** 0.5,
        projection=loader.projection("model.per_layer_model_projection", label="per_layer_inputs"),
        norm=Norm(norm.weight, norm.eps * hidden),
    )
