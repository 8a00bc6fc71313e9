"""Activations between two ops, as a value: the floats, and data that their backend keeps for the next product."""

from dataclasses import dataclass
from typing import final

from jaxtyping import Float
from torch import Tensor


@final
@dataclass(frozen=True)
class Activations:
    """Result of an op that another op multiplies: q, k and v, attended values, or the hidden values of an MLP.

    The backend that made the floats owns their `twin`, and only its next op reads it. The twin is the same values in
    integers, or a promise that the command that makes the floats can also write them in integers. Without a twin, the
    next op quantises the floats itself, with the same result. A twin belongs to exactly these floats, whole and
    unchanged. So rows or columns of them, and copies that a gather makes from several ranks, are new activations
    without a twin.
    """

    floats: Float[Tensor, "tokens width"]
    twin: object = None
