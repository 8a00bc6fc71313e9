"""The choice of experts: the experts of each token with their weights, and tiles of the tokens that share an expert.

The launch that chooses also quantises the tokens for the experts, in programs of its own.

A pair is a token and one of its experts. Token t has the pairs from t × chosen on, by ascending number of the expert.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

from infer.compute.backends.cuda.activations import BLOCKS, Quantized, empty_planes, quantize_part
from infer.compute.backends.cuda.epilogue import sigmoid
from infer.compute.backends.cuda.layouts import BLOCK
from infer.compute.backends.cuda.sampling.sampler import EXACT
from infer.compute.operands.feed_forwards import Router

TILE = 16  # pairs of one expert that a program multiplies
_PAIRS = 256  # that a program puts into tiles
_COUNTED = tl.constexpr(2048)  # pairs that are counted at a time
_COMPARED = tl.constexpr(8192)  # numbers of a tile and of an expert that are compared at a time
INFINITY = tl.constexpr(float("inf"))


class Tiles(NamedTuple):
    """Pairs by expert, in tiles. The last tile of an expert may have fewer pairs."""

    experts: Any  # int32 [tiles], −1 for an unused tile
    pairs: Any  # int32 [tiles, TILE], −1 for an unused place


class Choice(NamedTuple):
    """The experts that some tokens have chosen."""

    experts: Tensor  # int32 [tokens, chosen]; −1 for the experts of a token that is NaN
    weights: Tensor  # float32 [tokens, chosen]
    tiles: Tiles | None = None  # None: each pair has programs of its own


def choose(
    logits: Float[Tensor, "tokens experts"],
    router: Router,
    correction: Float[Tensor, "experts"] | None,
    expert_scales: Float[Tensor, "experts"] | None,
    x: Float[Tensor, "tokens in"],
    form: int,
) -> tuple[Choice, Quantized | None]:
    """Return the choice, and x in planes of `form`, which other programs of the launch make. Form 0 has no planes."""
    (num_tokens, num_experts), num_blocks = logits.shape, triton.cdiv(x.shape[1], BLOCK) if form else 0
    experts = torch.empty(num_tokens, router.num_chosen, dtype=torch.int32, device=logits.device)
    weights = torch.empty(num_tokens, router.num_chosen, device=logits.device)
    made = empty_planes(num_tokens, num_blocks, form, logits.device) if form else None
    choose_experts[num_tokens, 1 + triton.cdiv(num_blocks, BLOCKS)](
        logits, logits if correction is None else correction, logits if expert_scales is None else expert_scales,
        experts, weights, num_experts, router.floor, router.scale, x,
        Quantized(x, x, x) if made is None else made.in_bytes(), x.shape[1],
        SCORES=router.scores, CHOSEN=router.num_chosen, PLACES=triton.next_power_of_2(router.num_chosen),
        SIZE=triton.next_power_of_2(num_experts), IS_NORMALIZED=router.is_normalized,
        HAS_CORRECTION=correction is not None, HAS_SCALES=expert_scales is not None, PLANES=form, BLOCKS=BLOCKS,
        num_warps=4, **EXACT,
    )  # fmt: skip
    return Choice(experts, weights), made


def tiles_of(choice: Choice, num_experts: int) -> Tiles:
    """Return tiles for all pairs. Their number is the largest that any choice of as many tokens needs."""
    num_pairs, device = choice.experts.numel(), choice.experts.device
    num_tiles, size = min(num_pairs, num_pairs // TILE + num_experts), max(32, triton.next_power_of_2(num_experts))
    experts = torch.empty(num_tiles, dtype=torch.int32, device=device)
    next_places = torch.empty(num_experts, dtype=torch.int32, device=device)
    pairs = torch.empty((num_tiles, TILE), dtype=torch.int32, device=device)
    plan_tiles[(1,)](
        choice.experts, experts, pairs, next_places, num_pairs, num_experts, num_tiles,
        TILE=TILE, SIZE=size, num_warps=8, **EXACT,
    )  # fmt: skip
    fill_tiles[(triton.cdiv(num_pairs, _PAIRS),)](choice.experts, pairs, next_places, num_pairs, PAIRS=_PAIRS)
    return Tiles(experts, pairs)


@triton.jit
def choose_experts(
    logits, correction, expert_scales, experts, weights, num_experts, floor, scale, x, to, features,
    SCORES: tl.constexpr, CHOSEN: tl.constexpr, PLACES: tl.constexpr, SIZE: tl.constexpr, IS_NORMALIZED: tl.constexpr,
    HAS_CORRECTION: tl.constexpr, HAS_SCALES: tl.constexpr, PLANES: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Choose the experts of one token, or quantise some blocks of its x [features] in PLANES, and store them in `to`.

    Programs of index 0 in the second axis choose, and the others quantise. `backends.reference.route` defines the
    choice and the weights.
    """
    token, i, part = tl.program_id(0).to(tl.int64), tl.arange(0, SIZE), tl.program_id(1)
    if part > 0:
        if PLANES:
            quantize_part(x, token, token, x, to, features, part - 1, False, PLANES, BLOCKS)
        return
    is_there = i < num_experts
    logit = tl.load(logits + token * num_experts + i, mask=is_there, other=-INFINITY)
    scores = logit
    if SCORES == "softmax":
        scores = _softmax(logit)
    elif SCORES == "sigmoid":
        scores = sigmoid(logit)
    ranks = scores
    if HAS_CORRECTION:
        ranks = scores + tl.load(correction + i, mask=is_there, other=0.0)
    taken = _largest(ranks, is_there, CHOSEN, SIZE)
    if SCORES == "softmax_of_chosen":
        scores = _softmax(tl.where(taken == 1, logit, -INFINITY))
    elif SCORES == "sigmoid_of_chosen":
        scores = sigmoid(logit)
    shares = tl.where(taken == 1, scores, 0.0)
    if IS_NORMALIZED:
        shares = tl.div_rn(shares, tl.sum(shares, axis=0) + floor)
    shares = shares * scale
    if HAS_SCALES:
        shares = shares * tl.load(expert_scales + i, mask=is_there, other=0.0)
    num_none = tl.sum((logit != logit).to(tl.int32), axis=0)
    is_mine = tl.where(taken == 1, num_none, 1) == 0
    places, own = tl.arange(0, PLACES), token * CHOSEN + tl.cumsum(taken, axis=0) - 1
    tl.store(experts + token * CHOSEN + places, places * 0 - 1, mask=tl.where(places < CHOSEN, num_none, 0) > 0)
    tl.store(experts + own, i, mask=is_mine)
    tl.store(weights + own, shares, mask=is_mine)


@triton.jit
def _largest(ranks, is_there, CHOSEN: tl.constexpr, SIZE: tl.constexpr):
    """Return 1 for the largest ranks, and 0 for the others. Of equal ones the first counts."""
    i, taken = tl.arange(0, SIZE), tl.zeros((SIZE,), tl.int32)
    for _ in range(CHOSEN):
        is_free = is_there & (taken == 0)
        best = tl.max(tl.where(is_free, ranks, -INFINITY), axis=0)
        first = tl.min(tl.where(is_free & (ranks == best), i, SIZE), axis=0)
        taken = tl.where(i == first, 1, taken)
    return taken


@triton.jit
def _softmax(x):
    e = tl.exp(x - tl.max(x, axis=0))
    return tl.div_rn(e, tl.zeros_like(e) + tl.sum(e, axis=0))


@triton.jit(do_not_specialize=["num_pairs", "num_tiles"])
def plan_tiles(
    chosen, experts, pairs, next_places, num_pairs, num_experts, num_tiles, TILE: tl.constexpr, SIZE: tl.constexpr
):
    """Store the expert of each tile, no pairs in it, and the place of each expert's first pair."""
    i, counts = tl.arange(0, SIZE), tl.zeros((SIZE,), tl.int32)
    for start in range(0, num_pairs, _COUNTED):
        pair = start + tl.arange(0, _COUNTED)
        expert = tl.load(chosen + pair, mask=pair < num_pairs, other=-1)
        counts += tl.histogram(tl.maximum(expert, 0), SIZE, mask=expert >= 0)
    tiles = tl.cdiv(counts, TILE)
    ends = tl.cumsum(tiles, axis=0)
    tl.store(next_places + i, (ends - tiles) * TILE, mask=i < num_experts)
    at_once: tl.constexpr = max(1, _COMPARED // SIZE)
    for start in range(0, num_tiles, at_once):
        tile = start + tl.arange(0, at_once)
        expert = tl.sum((ends[None, :] <= tile[:, None]).to(tl.int32), axis=1)  # SIZE for a tile after the last
        tl.store(experts + tile, tl.where(expert < num_experts, expert, -1), mask=tile < num_tiles)
        places = tile[:, None] * TILE + tl.arange(0, TILE)[None, :]
        tl.store(pairs + places, places * 0 - 1, mask=(tile < num_tiles)[:, None])


@triton.jit(do_not_specialize=["num_pairs"])
def fill_tiles(experts, pairs, next_places, num_pairs, PAIRS: tl.constexpr):
    """Put each pair into a tile of its expert. Its place within them differs from run to run; its bits do not."""
    pair = tl.program_id(0) * PAIRS + tl.arange(0, PAIRS)
    expert = tl.load(experts + pair, mask=pair < num_pairs, other=-1)
    place = tl.atomic_add(next_places + tl.maximum(expert, 0), 1, mask=expert >= 0)
    tl.store(pairs + place, pair, mask=expert >= 0)
