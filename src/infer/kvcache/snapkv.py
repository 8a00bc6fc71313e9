"""Which of a prompt's tokens are kept: those that its last tokens look at (SnapKV, arXiv:2404.14469)."""

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int64
from torch import Tensor

POOLED = 7  # neighbours that are kept for each other's sake


def choose_slots(
    weights: Float[Tensor, "kv_heads group tokens slots"], num_first: int, num_kept: int
) -> Int64[Tensor, "kv_heads kept"]:
    """The slots to keep, in ascending order, for each head of keys and values by itself.

    `weights` is the attention of a prompt's last tokens over all of it. Kept are the first `num_first`, those last
    tokens, and between them the slots with the most attention, summed over tokens and over the heads of a group, and
    each taken as the largest of its neighbourhood. Of equals the first.
    """
    num_last, length = weights.shape[2:]
    votes = weights[..., num_first : length - num_last].sum((1, 2))
    pooled = F.max_pool1d(votes, POOLED, stride=1, padding=POOLED // 2)
    best = pooled.sort(dim=-1, descending=True, stable=True).indices[:, : num_kept - num_first - num_last]
    slots = torch.arange(length, device=weights.device).expand(len(weights), -1)
    return torch.cat([slots[:, :num_first], best.sort().values + num_first, slots[:, length - num_last :]], dim=-1)
