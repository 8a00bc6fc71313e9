"""The choice of experts: the experts of each token with their weights, and tiles of the tokens that share an expert.

A pair is a token and one of its experts. Token t has the pairs from t × chosen on, by ascending number of the expert.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

from infer.compute.backends.cuda.epilogue import sigmoid
from infer.compute.backends.cuda.sampling.sampler import EXACT
from infer.compute.operands.feed_forwards import Router

TILE = 16  # pairs of one expert that a program multiplies
_PAIRS = 256  # that a program puts into tiles
_COMPARED = 8192  # numbers of a tile and of an expert that are compared at a time
INFINITY = tl.constexpr(float("inf"))


class Choice(NamedTuple):
    """The experts that some tokens have chosen."""

    experts: Tensor  # int32 [tokens, chosen]; −1 for the experts of a token that is NaN
    weights: Tensor  # float32 [tokens, chosen]
    counts: Tensor  # int32 [experts], the number of pairs of each expert


class Tiles(NamedTuple):
    """Pairs by expert, in tiles. The last tile of an expert may have fewer pairs."""

    experts: Any  # int32 [tiles], −1 for an unused tile
    pairs: Any  # int32 [tiles, TILE], −1 for an unused place


def choose(
    logits: Float[Tensor, "tokens experts"],
    router: Router,
    correction: Float[Tensor, "experts"] | None,
    expert_scales: Float[Tensor, "experts"] | None,
) -> Choice:
    num_tokens, num_experts = logits.shape
    experts = torch.empty(num_tokens, router.num_chosen, dtype=torch.int32, device=logits.device)
    weights = torch.empty(num_tokens, router.num_chosen, device=logits.device)
    counts = torch.zeros(num_experts, dtype=torch.int32, device=logits.device)
    choose_experts[(num_tokens,)](
        logits, logits if correction is None else correction, logits if expert_scales is None else expert_scales,
        experts, weights, counts, num_experts, router.floor, router.scale,
        SCORES=router.scores, CHOSEN=router.num_chosen, PLACES=triton.next_power_of_2(router.num_chosen),
        SIZE=triton.next_power_of_2(num_experts), IS_NORMALIZED=router.is_normalized,
        HAS_CORRECTION=correction is not None, HAS_SCALES=expert_scales is not None, num_warps=4, **EXACT,
    )  # fmt: skip
    return Choice(experts, weights, counts)


def tiles_of(choice: Choice) -> Tiles:
    """Return tiles for all pairs. Their number is the largest that any choice of as many tokens needs."""
    num_pairs, num_experts = choice.experts.numel(), len(choice.counts)
    num_tiles = min(num_pairs, num_pairs // TILE + num_experts)
    device, size = choice.experts.device, triton.next_power_of_2(num_experts)
    experts = torch.empty(num_tiles, dtype=torch.int32, device=device)
    next_places = torch.empty(num_experts, dtype=torch.int32, device=device)
    pairs = torch.full((num_tiles, TILE), -1, dtype=torch.int32, device=device)
    plan_tiles[(1,)](
        choice.counts, experts, next_places, num_experts, num_tiles,
        TILE=TILE, SIZE=size, AT_ONCE=max(1, _COMPARED // size), num_warps=8, **EXACT,
    )  # fmt: skip
    fill_tiles[(triton.cdiv(num_pairs, _PAIRS),)](choice.experts, pairs, next_places, num_pairs, PAIRS=_PAIRS)
    return Tiles(experts, pairs)


@triton.jit
def choose_experts(
    logits, correction, expert_scales, experts, weights, counts, num_experts, floor, scale,
    SCORES: tl.constexpr, CHOSEN: tl.constexpr, PLACES: tl.constexpr, SIZE: tl.constexpr, IS_NORMALIZED: tl.constexpr,
    HAS_CORRECTION: tl.constexpr, HAS_SCALES: tl.constexpr,
):  # fmt: skip
    """Choose the experts of one token. `backends.reference.route` defines the choice and the weights."""
    token, i = tl.program_id(0).to(tl.int64), tl.arange(0, SIZE)
    is_there = i < num_experts
    x = tl.load(logits + token * num_experts + i, mask=is_there, other=-INFINITY)
    scores = x
    if SCORES == "softmax":
        scores = _softmax(x)
    elif SCORES == "sigmoid":
        scores = sigmoid(x)
    ranks = scores
    if HAS_CORRECTION:
        ranks = scores + tl.load(correction + i, mask=is_there, other=0.0)
    taken = tl.zeros((SIZE,), tl.int32)
    for _ in range(CHOSEN):
        is_free = is_there & (taken == 0)
        best = tl.max(tl.where(is_free, ranks, -INFINITY), axis=0)
        first = tl.min(tl.where(is_free & (ranks == best), i, SIZE), axis=0)
        taken = tl.where(i == first, 1, taken)
    if SCORES == "softmax_of_chosen":
        scores = _softmax(tl.where(taken == 1, x, -INFINITY))
    elif SCORES == "sigmoid_of_chosen":
        scores = sigmoid(x)
    shares = tl.where(taken == 1, scores, 0.0)
    if IS_NORMALIZED:
        shares = tl.div_rn(shares, tl.sum(shares, axis=0) + floor)
    shares = shares * scale
    if HAS_SCALES:
        shares = shares * tl.load(expert_scales + i, mask=is_there, other=0.0)
    num_none = tl.sum((x != x).to(tl.int32), axis=0)
    is_mine = tl.where(taken == 1, num_none, 1) == 0
    places, own = tl.arange(0, PLACES), token * CHOSEN + tl.cumsum(taken, axis=0) - 1
    tl.store(experts + token * CHOSEN + places, places * 0 - 1, mask=tl.where(places < CHOSEN, num_none, 0) > 0)
    tl.store(experts + own, i, mask=is_mine)
    tl.store(weights + own, shares, mask=is_mine)
    tl.atomic_add(counts + i, taken, mask=is_mine)


@triton.jit
def _softmax(x):
    e = tl.exp(x - tl.max(x, axis=0))
    return tl.div_rn(e, tl.zeros_like(e) + tl.sum(e, axis=0))


@triton.jit(do_not_specialize=["num_tiles"])
def plan_tiles(
    counts, experts, next_places, num_experts, num_tiles, TILE: tl.constexpr, SIZE: tl.constexpr, AT_ONCE: tl.constexpr
):
    """Store the expert of each tile, and the place of each expert's first pair."""
    i = tl.arange(0, SIZE)
    tiles = tl.cdiv(tl.load(counts + i, mask=i < num_experts, other=0), TILE)
    ends = tl.cumsum(tiles, axis=0)
    tl.store(next_places + i, (ends - tiles) * TILE, mask=i < num_experts)
    for start in range(0, num_tiles, AT_ONCE):
        tile = start + tl.arange(0, AT_ONCE)
        expert = tl.sum((ends[None, :] <= tile[:, None]).to(tl.int32), axis=1)  # SIZE for a tile after the last
        tl.store(experts + tile, tl.where(expert < num_experts, expert, -1), mask=tile < num_tiles)


@triton.jit(do_not_specialize=["num_pairs"])
def fill_tiles(experts, pairs, next_places, num_pairs, PAIRS: tl.constexpr):
    """Put each pair into a tile of its expert. Its place within them differs from run to run; its bits do not."""
    pair = tl.program_id(0) * PAIRS + tl.arange(0, PAIRS)
    expert = tl.load(experts + pair, mask=pair < num_pairs, other=-1)
    place = tl.atomic_add(next_places + tl.maximum(expert, 0), 1, mask=expert >= 0)
    tl.store(pairs + place, pair, mask=expert >= 0)
