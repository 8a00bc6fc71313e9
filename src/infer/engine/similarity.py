"""Pairs of texts compared by their vectors: the cosine of the angle between the two vectors of a pair."""

from collections.abc import Sequence

from jaxtyping import Float
from torch import Tensor

TextPair = tuple[str, str]


def texts_of_pairs(pairs: Sequence[TextPair]) -> list[str]:
    """Return the texts to embed: the second text of each pair, then each different first text once."""
    return [*(second for _, second in pairs), *dict.fromkeys(first for first, _ in pairs)]


def cosines(pairs: Sequence[TextPair], vectors: Float[Tensor, "texts size"]) -> list[float]:
    """Return the cosine of each pair, from −1 to 1. `vectors` are those of `texts_of_pairs`, of length 1.

    Each sum is computed by itself in float64, so a cosine's bits depend on its own pair alone.
    """
    firsts, wide = dict.fromkeys(first for first, _ in pairs), vectors.double()
    places = {first: len(pairs) + at for at, first in enumerate(firsts)}
    return [float((wide[places[first]] * wide[at]).sum()) for at, (first, _) in enumerate(pairs)]
