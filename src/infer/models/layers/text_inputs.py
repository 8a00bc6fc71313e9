"""The weights of the inputs that an encoder adds to the embeddings of a text's tokens."""

from infer.compute.operands.architecture import TextInputs
from infer.compute.operands.weights import TextInputWeights
from infer.models.weight_loader import WeightLoader


def load_text_inputs(own: TextInputs, loader: WeightLoader) -> TextInputWeights:
    """Return the tables and the norm, in float32."""
    return TextInputWeights(
        positions=loader.vector("model.embed_positions.weight") if own.num_positions else None,
        types=loader.vector("model.embed_types.weight") if own.num_types else None,
        norm=loader.norm("model.embed_norm"),
    )
