"""The weights of the inputs that an encoder adds to the embeddings of a text's tokens."""

from infer.model.weight_loader import WeightLoader
from infer.operands.architecture import TextInputs
from infer.operands.weights import TextInputWeights


def load_text_inputs(own: TextInputs, loader: WeightLoader) -> TextInputWeights:
    """Return the tables and the norm, in float32."""
    return TextInputWeights(
        positions=loader.vector("model.embed_positions.weight") if own.num_positions else None,
        types=loader.vector("model.embed_types.weight") if own.num_types else None,
        norm=loader.norm("model.embed_norm"),
    )
