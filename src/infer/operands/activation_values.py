"""Activations between two ops, as a value: the floats, and what their backend keeps for the product that reads them."""

from dataclasses import dataclass
from typing import final

from jaxtyping import Float
from torch import Tensor


@final
@dataclass(frozen=True)
class Activations:
    """Result of an op that another op multiplies: q, k and v, attended values, or the hidden values of an MLP.

    The backend that made the floats owns their `twin`, and only its next op reads it: the same values in integers, or
    the offer of the command that makes the floats to write them in integers too. Without a twin, that op quantises the
    floats itself, with the same result. A twin is of these floats, whole and unchanged. So rows or columns of them, and
    what a gather copies from several ranks, are new activations without a twin.
    """

    floats: Float[Tensor, "tokens width"]
    twin: object = None
