"""The first half of `attend`: norms of q and k, their rotation, and storing the step's keys and values in the cache.

A program handles one token and one kv head, with the query heads that share it. Queries are passed to `attention` in
float32, and mixed if the stored keys are. If a row may be longer than the model's context, they are rotated a second
time for the sinks. A token whose row is −1 is padding: a recorded step may have more tokens than the real step.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from infer.compute.backends.cuda.attention_items import plan_items
from infer.compute.backends.cuda.kv_blocks import Q8, mix, place_of, store_key, store_value

NO_NORM = tl.constexpr(0)
HEAD_NORM = tl.constexpr(1)
WHOLE_NORM = tl.constexpr(2)
NORM_AFTER = tl.constexpr(3)  # of each head, after its rotation
CENTRED_NORM = tl.constexpr(4)  # of each head, minus its mean, with weights of its own


class Rotation(NamedTuple):
    """Values of a layer that all of its tokens share. Tensors that are not read are replaced by any existing one."""

    q_norm: Any
    k_norm: Any
    q_eps: Any
    k_eps: Any
    cos: Any
    sin: Any
    set_size: Any  # of a set of angles
    num_sets: Any
    rope_sets: Any
    last_position: Any
    v_eps: Any  # of the norm of each head of v
    query_scales: Any  # by position
    HAS_V_NORM: tl.constexpr
    HAS_SCALES: tl.constexpr


class Columns(NamedTuple):
    """Location of a rank's heads in the columns of qkv, as constants."""

    WIDTH: tl.constexpr  # all columns of a token
    Q: tl.constexpr
    K: tl.constexpr
    V: tl.constexpr
    HAS_KEYS: tl.constexpr  # otherwise keys and values are already in the cache


@triton.jit(do_not_specialize=["num_planners", "capacity", "num_slots"])
def rotate_append(
    qkv, near, far, items, num_planners, capacity, num_slots, rows, positions, rotation, cache, columns,
    NUM_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, HALF: tl.constexpr, SIZE: tl.constexpr,
    GROUP_SIZE: tl.constexpr, Q_NORM: tl.constexpr, K_NORM: tl.constexpr, HAS_FAR: tl.constexpr,
    KV_TYPE: tl.constexpr, SPLITS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Store the rotated queries in near and far [tokens, heads, DIM], and keys and values in the cache.

    SIZE and GROUP_SIZE are DIM and the heads of a group, rounded up to powers of 2. The first `num_planners` programs,
    1 or 0, have no token: one of them plans the items of `attention_chunks` for all layers of the page group. The
    others set their number of arrivals to 0.
    """
    token, head = tl.program_id(0) - num_planners, tl.program_id(1)
    row = tl.load(rows + tl.maximum(token, 0))
    if token >= 0:
        tl.store(items.arrivals + token * KV_HEADS + head, 0)
        if row >= 0:
            _rotate_token(
                qkv, near, far, token, head, row, positions, rotation, cache, columns,
                NUM_HEADS, KV_HEADS, DIM, HALF, SIZE, GROUP_SIZE, Q_NORM, K_NORM, HAS_FAR, KV_TYPE,
            )  # fmt: skip
    elif head == 0:
        num_tokens = tl.num_programs(0) - num_planners
        plan_items(items.fields, rows, positions, num_tokens, capacity, num_slots, cache, SPLITS, TILE)


@triton.jit
def _rotate_token(
    qkv, near, far, token, head, row, positions, rotation, cache, columns,
    NUM_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, HALF: tl.constexpr, SIZE: tl.constexpr,
    GROUP_SIZE: tl.constexpr, Q_NORM: tl.constexpr, K_NORM: tl.constexpr, HAS_FAR: tl.constexpr,
    KV_TYPE: tl.constexpr,
):  # fmt: skip
    position = tl.load(positions + token)
    i, group = tl.arange(0, SIZE)[None, :], tl.arange(0, GROUP_SIZE)[:, None]
    own = qkv + token * columns.WIDTH
    angles = tl.minimum(tl.load(rotation.rope_sets + row), rotation.num_sets - 1) * rotation.set_size

    per_group: tl.constexpr = NUM_HEADS // KV_HEADS
    heads = head * per_group + group
    is_mine = (group < per_group) & (i < DIM)
    x = own + columns.Q
    scale = _scale(x, rotation.q_norm, heads, rotation.q_eps, i, is_mine, NUM_HEADS, DIM, Q_NORM)
    at = (token * NUM_HEADS + heads) * DIM + i
    angle = angles + position * HALF
    q = _rotated(x, rotation.q_norm, heads, scale, rotation.q_eps, rotation, angle, i, is_mine, DIM, HALF, Q_NORM)
    _store_queries(near + at, q, position, rotation, is_mine, GROUP_SIZE, SIZE, KV_TYPE)
    if HAS_FAR:
        capped = angles + tl.minimum(position, rotation.last_position) * HALF
        q = _rotated(x, rotation.q_norm, heads, scale, rotation.q_eps, rotation, capped, i, is_mine, DIM, HALF, Q_NORM)
        _store_queries(far + at, q, position, rotation, is_mine, GROUP_SIZE, SIZE, KV_TYPE)
    if columns.HAS_KEYS:
        _append(own, head, row, position, angle, rotation, cache, columns, KV_HEADS, DIM, HALF, SIZE, K_NORM, KV_TYPE)


@triton.jit
def _store_queries(
    to, q, position, rotation, is_mine, GROUP_SIZE: tl.constexpr, SIZE: tl.constexpr, KV_TYPE: tl.constexpr
):
    if rotation.HAS_SCALES:
        q = q * tl.load(rotation.query_scales + position)
    if KV_TYPE >= Q8:
        q = mix(q, GROUP_SIZE, SIZE)
    tl.store(to, q, mask=is_mine)


@triton.jit
def _append(
    own, head, row, position, angle, rotation, cache, columns,
    KV_HEADS: tl.constexpr, DIM: tl.constexpr, HALF: tl.constexpr, SIZE: tl.constexpr, K_NORM: tl.constexpr,
    KV_TYPE: tl.constexpr,
):  # fmt: skip
    """Store the key and the value of a kv head of a token in the cache."""
    x, i = own + columns.K, tl.arange(0, SIZE)[None, :]
    one = tl.full((1, 1), 0, tl.int32) + head
    scale = _scale(x, rotation.k_norm, one, rotation.k_eps, i, i < DIM, KV_HEADS, DIM, K_NORM)
    k = _rotated(x, rotation.k_norm, one, scale, rotation.k_eps, rotation, angle, i, i < DIM, DIM, HALF, K_NORM)
    j = tl.arange(0, SIZE)
    v = tl.load(own + columns.V + head * DIM + j, mask=j < DIM, other=0.0)
    one_or_nan = 1.0 + tl.sum(k * 0.0) + tl.sum(v * 0.0)
    k = tl.where(i == 0, k * one_or_nan, k)  # as `kv_layout.storable`
    if KV_TYPE >= Q8:
        k = mix(k, 1, SIZE)
    page, block, lane = place_of(cache, row, position - tl.load(cache.shifts + row))
    store_key(cache, head, page, block, lane, tl.reshape(k, (SIZE,)), j, DIM, SIZE, KV_TYPE)
    if rotation.HAS_V_NORM:
        v = v * tl.div_rn(1.0, tl.sqrt_rn(tl.sum(v * v) / DIM + rotation.v_eps))
    v = tl.where(tl.abs(v) < float("inf"), v, 0.0)
    store_value(cache, head, page, block, lane, v, j, DIM, SIZE, KV_TYPE)


@triton.jit
def _scale(x, weight, heads, eps, i, is_mine, NUM_HEADS: tl.constexpr, DIM: tl.constexpr, NORM: tl.constexpr):
    """Return what is subtracted from x, and 1 / √(mean(x²) + eps): of each head, or of all heads together."""
    if NORM == WHOLE_NORM:
        each = tl.arange(0, triton.next_power_of_2(NUM_HEADS * DIM))
        whole = tl.load(x + each, mask=each < NUM_HEADS * DIM, other=0.0)
        return 0.0, tl.div_rn(1.0, tl.sqrt_rn(tl.sum(whole * whole) / (NUM_HEADS * DIM) + eps))
    elif NORM == HEAD_NORM:  # noqa: RET505 - constant conditions: only one of the four is compiled
        own = tl.load(x + heads * DIM + i, mask=is_mine, other=0.0)
        return 0.0, tl.div_rn(1.0, tl.sqrt_rn(tl.sum(own * own, axis=1, keep_dims=True) / DIM + eps))
    elif NORM == CENTRED_NORM:
        own = tl.load(x + heads * DIM + i, mask=is_mine, other=0.0)
        mean = tl.sum(own, axis=1, keep_dims=True) / DIM
        own = tl.where(is_mine, own - mean, 0.0)
        return mean, tl.div_rn(1.0, tl.sqrt_rn(tl.sum(own * own, axis=1, keep_dims=True) / DIM + eps))
    else:
        return 0.0, 1.0


@triton.jit
def _rotated(
    x, weight, heads, scale, eps, rotation, angle, i, is_mine, DIM: tl.constexpr, HALF: tl.constexpr, NORM: tl.constexpr
):
    """Return elements i of heads, normalised. Elements i and i + HALF rotate together, and the rest stay."""
    own = _normalized(x, weight, heads, scale, i, is_mine, DIM, NORM)
    if HALF > 0:
        is_turned = i < 2 * HALF
        partner = tl.where(i < HALF, i + HALF, i - HALF)
        other = _normalized(x, weight, heads, scale, partner, is_mine & is_turned, DIM, NORM)
        pair = tl.where(i < HALF, i, partner)
        cos = tl.load(rotation.cos + angle + pair, mask=is_turned, other=1.0)
        sin = tl.load(rotation.sin + angle + pair, mask=is_turned, other=0.0)
        own = own * cos + tl.where(i < HALF, -other, other) * sin
    if NORM == NORM_AFTER:
        scale = tl.div_rn(1.0, tl.sqrt_rn(tl.sum(own * own, axis=1, keep_dims=True) / DIM + eps))
        own = own * scale * tl.load(weight + i, mask=is_mine, other=0.0)
    return own


@triton.jit
def _normalized(x, weight, heads, scale, i, is_mine, DIM: tl.constexpr, NORM: tl.constexpr):
    own = tl.load(x + heads * DIM + i, mask=is_mine, other=0.0)
    if NORM == WHOLE_NORM:
        own = own * scale[1] * tl.load(weight + heads * DIM + i, mask=is_mine, other=0.0)
    elif NORM == CENTRED_NORM:
        own = (own - scale[0]) * scale[1] * tl.load(weight + heads * DIM + i, mask=is_mine, other=0.0)
    elif NORM == HEAD_NORM:
        own = own * scale[1] * tl.load(weight + i, mask=is_mine, other=0.0)
    return own
