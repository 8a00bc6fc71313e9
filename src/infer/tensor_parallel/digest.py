"""Digests of logits: a few bytes that ranks compare."""

import hashlib

from jaxtyping import Float
from torch import Tensor


def digest_of(logits: Float[Tensor, "logits vocab"]) -> bytes:
    return hashlib.blake2b(logits.float().contiguous().cpu().numpy().tobytes(), digest_size=16).digest()
