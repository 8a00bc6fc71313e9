"""Cache blocks as kernels write and read them: `quantization.kv_layout` for 16 positions of a head, every kv type.

Offsets count the elements of a type's codes: floats, or bytes if they are quantised. Quantised blocks have scales, and
minima for q4's values. They are float16 and follow the codes of each 32 dimensions.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from infer.compute.quantization.kv_formats import KV_TYPES
from infer.compute.quantization.kv_layout import LayerCache

Q8 = tl.constexpr(KV_TYPES.index("q8"))
Q4 = tl.constexpr(KV_TYPES.index("q4"))
LANES = tl.constexpr(16)  # positions of a block
TURN = tl.constexpr(64)  # positions that attention reads at a time
GROUP = tl.constexpr(32)  # dimensions that share a scale
CODES = tl.constexpr(512)  # bytes of a record of 8-bit codes
RECORD = tl.constexpr(544)  # with its scales
NARROW_CODES = tl.constexpr(256)  # of 4-bit codes
NARROW_RECORD = tl.constexpr(320)  # with scales and minima
ROUNDER = tl.constexpr(1.5 * 2**23)  # x + it − it is x rounded to the nearest integer, ties to even
LARGEST_HALF = tl.constexpr(65504.0)
LARGEST_BF16 = tl.constexpr((2 - 2.0**-7) * 2.0**127)
ROOT = tl.constexpr(32**-0.5)
QUANTIZED_UNIT = tl.constexpr(2.0**-7)  # quantised keys and values divided by 128 are no larger than a float16

_STORED = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16, "q8": torch.int8, "q4": torch.int8}


class Part(NamedTuple):
    """Keys or values of a layer, by [kv head, page, block]."""

    codes: Any
    scales: Any  # the same memory as halves
    head: Any  # codes from a kv head to the next
    page: Any
    block: Any


class Blocks(NamedTuple):
    """A layer's keys and values, and the location of each row's slots."""

    key: Any
    value: Any
    table: Any
    table_row: Any
    PAGE_TOKENS: Any  # a constant: dividing by it is a shift
    shifts: Any
    sinks: Any
    windows: Any


def make_blocks(layer: LayerCache) -> Blocks:
    pages, page_tokens = layer.pages, tl.constexpr(layer.pages.page_tokens)
    key, value = (_part(memory, _STORED[layer.kv_type]) for memory in (layer.keys, layer.values))
    line = pages.table.stride(0)
    return Blocks(key, value, pages.table, line, page_tokens, pages.shifts, pages.sinks, pages.windows)


def _part(memory: Tensor, stored: torch.dtype) -> Part:
    codes = memory.view(stored)
    return Part(codes, codes if stored.is_floating_point else memory.view(torch.float16), *codes.stride()[:3])


@triton.jit
def place_of(cache, row, slot):
    """Return the page of a slot, its block and its lane."""
    slot = tl.cast(slot, tl.int64)
    page = tl.load(cache.table + row * cache.table_row + slot // cache.PAGE_TOKENS)
    return page, slot % cache.PAGE_TOKENS // LANES, slot % LANES


@triton.jit
def locate_turn(cache, row, start, is_read):
    """Return the page, the block and the lane of the TURN slots from `start` on, a multiple of TURN.

    The page is one number unless pages are smaller than a turn. Then no page is looked up if `is_read` is false.
    """
    slots = start + tl.arange(0, TURN)
    line = cache.table + row * cache.table_row
    if cache.PAGE_TOKENS >= TURN:
        page = tl.load(line + start // cache.PAGE_TOKENS)
    else:
        page = tl.load(line + slots // cache.PAGE_TOKENS, mask=is_read, other=0)
    block = start % cache.PAGE_TOKENS // LANES + tl.arange(0, TURN) // LANES
    if cache.PAGE_TOKENS < TURN:
        block = slots % cache.PAGE_TOKENS // LANES
    return page, block, tl.arange(0, TURN) % LANES


@triton.jit
def load_keys(cache, head, page, block, lane, from_dim, DIM: tl.constexpr, SIZE: tl.constexpr, KV_TYPE: tl.constexpr):
    """Return a turn's keys [dims, slots] for SIZE dims from `from_dim` on. Quantised keys are mixed.

    Floats are returned in the stored type, other keys in float32 and divided by QUANTIZED_UNIT. Keys that were never
    written can be anything, including NaN.
    """
    i = tl.arange(0, SIZE) + from_dim
    first, columns = _offsets(head, page, block, cache.key)
    is_there = (i < DIM)[:, None]
    if KV_TYPE >= Q8:
        columns = _aligned(columns)
        at = cache.key.codes + first + (columns + lane)[None, :] + (i // GROUP * RECORD + i % GROUP * LANES)[:, None]
        codes = tl.load(at) if DIM // SIZE * SIZE == DIM else tl.load(at, mask=is_there, other=0)
        group = (tl.arange(0, SIZE // GROUP) + from_dim // GROUP)[:, None]
        halves = cache.key.scales + first // 2 + (columns // 2 + lane)[None, :] + group * (RECORD // 2) + CODES // 2
        scales = tl.load(halves, mask=group * GROUP < DIM, other=0.0).to(tl.float32) * QUANTIZED_UNIT
        wide = tl.broadcast_to(scales[:, None, :], (SIZE // GROUP, GROUP, TURN))
        return codes.to(tl.float32) * tl.reshape(wide, (SIZE, TURN))
    else:  # noqa: RET505 - a constant condition: only one of the two is compiled
        at = cache.key.codes + first + (_aligned(columns) + lane)[None, :] + (i * LANES)[:, None]
        return tl.load(at) if DIM // SIZE * SIZE == DIM else tl.load(at, mask=is_there, other=0.0)


@triton.jit
def load_values(
    cache, head, page, block, lane, from_dim, is_seen, DIM: tl.constexpr, SIZE: tl.constexpr, KV_TYPE: tl.constexpr
):
    """Return a turn's values [slots, dims], as `load_keys` does. Values that are not seen are 0."""
    i = tl.arange(0, SIZE) + from_dim
    first, lines = _offsets(head, page, block, cache.value)
    is_there = is_seen[:, None] if DIM // SIZE * SIZE == DIM else is_seen[:, None] & (i < DIM)[None, :]
    if KV_TYPE >= Q8:
        stored, halves_at = _quantized_values(cache, first, lines, lane, i, is_there, KV_TYPE)
        group = (tl.arange(0, SIZE // GROUP) + from_dim // GROUP)[None, :]
        step = RECORD // 2 if KV_TYPE == Q8 else NARROW_RECORD // 2
        halves = cache.value.scales + first // 2 + (lines // 2 + lane)[:, None] + group * step + halves_at
        is_group = is_seen[:, None] & (group * GROUP < DIM)
        value = stored * _by_dimension(tl.load(halves, mask=is_group, other=0.0), SIZE)
        if KV_TYPE == Q4:
            value += _by_dimension(tl.load(halves + LANES, mask=is_group, other=0.0), SIZE)
        return value
    else:  # noqa: RET505 - a constant condition: only one of the two is compiled
        at = cache.value.codes + first + (lines + lane * DIM)[:, None] + i[None, :]
        return tl.load(at, mask=is_there, other=0.0)


@triton.jit
def _quantized_values(cache, first, lines, lane, i, is_there, KV_TYPE: tl.constexpr):
    """Return the codes of values in float32, and the number of halves in a record before its scales."""
    if KV_TYPE == Q8:
        at = cache.value.codes + first + (lines + lane * GROUP)[:, None] + (i // GROUP * RECORD + i % GROUP)[None, :]
        return tl.load(at, mask=is_there, other=0).to(tl.float32), CODES // 2
    else:  # noqa: RET505 - a constant condition: only one of the two is compiled
        at = cache.value.codes + first + (lines + lane * 16)[:, None] + (i // GROUP * NARROW_RECORD + i % 16)[None, :]
        both = tl.load(at, mask=is_there, other=0)
        return tl.where((i % GROUP < 16)[None, :], both & 15, (both >> 4) & 15).to(tl.float32), NARROW_CODES // 2


@triton.jit
def _by_dimension(halves, SIZE: tl.constexpr):
    """Return halves [slots, groups], of each dimension's group [slots, SIZE], divided by 1 / QUANTIZED_UNIT."""
    wide = (halves.to(tl.float32) * QUANTIZED_UNIT)[:, :, None]
    return tl.reshape(tl.broadcast_to(wide, (TURN, SIZE // GROUP, GROUP)), (TURN, SIZE))


@triton.jit
def _offsets(head, page, block, part):
    """Return an offset that all slots of a turn share, and those of each slot's block from there."""
    first = head.to(tl.int64) * part.head
    if len(page.shape) == 0:
        first += page * part.page
        blocks = block * part.block
    else:
        blocks = page * part.page + block * part.block
    return first, blocks


@triton.jit
def _aligned(blocks):
    """Return offsets of blocks, known to be alike in 16 neighbouring slots. Otherwise loads become narrow."""
    return tl.max_constancy(tl.multiple_of(blocks, 16), 16)


@triton.jit
def store_key(cache, head, page, block, lane, x, i, DIM: tl.constexpr, SIZE: tl.constexpr, KV_TYPE: tl.constexpr):
    """Store x [SIZE], of which the first DIM elements count. If the key is quantised, x is already mixed."""
    at = head.to(tl.int64) * cache.key.head + page * cache.key.page + block * cache.key.block
    if KV_TYPE >= Q8:
        _store_8_bits(cache.key, at, tl.arange(0, GROUP)[None, :] * LANES + lane, lane, x, DIM, SIZE)
    else:
        tl.store(cache.key.codes + at + i * LANES + lane, _narrow(x, cache.key.codes), mask=i < DIM)


@triton.jit
def store_value(cache, head, page, block, lane, x, i, DIM: tl.constexpr, SIZE: tl.constexpr, KV_TYPE: tl.constexpr):
    at = head.to(tl.int64) * cache.value.head + page * cache.value.page + block * cache.value.block
    if KV_TYPE == Q8:
        _store_8_bits(cache.value, at, lane * GROUP + tl.arange(0, GROUP)[None, :], lane, x, DIM, SIZE)
    elif KV_TYPE == Q4:
        codes, scales, minima = _in_4_bits(x, SIZE)
        records, within = tl.arange(0, SIZE // GROUP), lane * 16 + tl.arange(0, 16)[None, :]
        is_there = records * GROUP < DIM
        tl.store(cache.value.codes + at + records[:, None] * NARROW_RECORD + within, codes, mask=is_there[:, None])
        halves = cache.value.scales + (at + records * NARROW_RECORD + NARROW_CODES) // 2 + lane
        tl.store(halves, scales, mask=is_there)
        tl.store(halves + LANES, minima, mask=is_there)
    else:
        tl.store(cache.value.codes + at + lane * DIM + i, _narrow(x, cache.value.codes), mask=i < DIM)


@triton.jit
def _narrow(x, stored):
    """Return x in the stored type, rounded to the nearest. Numbers beyond the type's range become its largest.

    bfloat16 uses integers, because the interpreter would truncate.
    """
    if stored.dtype.element_ty == tl.bfloat16:
        x = _saturated(x, LARGEST_BF16)
        bits = x.to(tl.int32, bitcast=True)
        rounded = tl.where(x == x, (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16, 0x7FC0)
        return rounded.to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:  # noqa: RET505 - a constant condition: only one of the two is compiled
        return _half(x) if stored.dtype.element_ty == tl.float16 else x


@triton.jit
def _half(x):
    return _saturated(x, LARGEST_HALF).to(tl.float16)


@triton.jit
def _saturated(x, LARGEST: tl.constexpr):
    """Return x, limited to [−LARGEST, LARGEST]. A NaN stays NaN."""
    return tl.where(x > LARGEST, LARGEST, tl.where(x < -LARGEST, -LARGEST, x))


@triton.jit
def _store_8_bits(part, at, within, lane, x, DIM: tl.constexpr, SIZE: tl.constexpr):
    """Store x [SIZE] from `at` on. `within` [1, GROUP] are the places of a group's codes in its record."""
    groups, records = tl.reshape(x, (SIZE // GROUP, GROUP)), tl.arange(0, SIZE // GROUP)
    scales = _half(tl.div_rn(tl.max(tl.abs(groups), axis=1) + _not_finite(groups), 127.0))
    steps = _steps(groups, scales)
    codes, is_there = tl.minimum(tl.maximum(steps, -127.0), 127.0).to(tl.int8), records * GROUP < DIM
    tl.store(part.codes + at + records[:, None] * RECORD + within, codes, mask=is_there[:, None])
    tl.store(part.scales + (at + records * RECORD + CODES) // 2 + lane, scales, mask=is_there)


@triton.jit
def _in_4_bits(x, SIZE: tl.constexpr):
    groups = tl.reshape(x, (SIZE // GROUP, GROUP))
    least = tl.min(groups, axis=1) + _not_finite(groups)
    scales, minima = _half(tl.div_rn(tl.max(groups, axis=1) - least, 15.0)), _half(least)
    steps = _steps(groups - minima.to(tl.float32)[:, None], scales)
    codes = tl.minimum(tl.maximum(steps, 0.0), 15.0).to(tl.int32)
    low, high = tl.split(tl.permute(tl.reshape(codes, (SIZE // GROUP, 2, 16)), (0, 2, 1)))
    return (low | (high << 4)).to(tl.int8), scales, minima


@triton.jit
def _steps(groups, scales):
    wide = scales.to(tl.float32)[:, None]
    return (tl.div_rn(groups, tl.where(wide == 0, 1.0, wide)) + ROUNDER) - ROUNDER


@triton.jit
def _not_finite(groups):
    """Return NaN for a group that holds a number that is not finite, else 0. A maximum would ignore a NaN."""
    return tl.sum(groups * 0.0, axis=1)


@triton.jit
def mix(x, ROWS: tl.constexpr, SIZE: tl.constexpr):
    """Return `kv_layout.mix` of the rows of x [ROWS, SIZE]: sums of two, 16 apart, then 8, 4, 2, 1."""
    x = _sums_of_two(x, 16, ROWS, SIZE)
    x = _sums_of_two(x, 8, ROWS, SIZE)
    x = _sums_of_two(x, 4, ROWS, SIZE)
    x = _sums_of_two(x, 2, ROWS, SIZE)
    return _sums_of_two(x, 1, ROWS, SIZE) * ROOT


@triton.jit
def _sums_of_two(x, APART: tl.constexpr, ROWS: tl.constexpr, SIZE: tl.constexpr):
    pairs = tl.reshape(x, (ROWS * SIZE // (2 * APART), 2, APART))
    first, second = tl.split(tl.permute(pairs, (0, 2, 1)))
    return tl.reshape(tl.permute(tl.join(first + second, first - second), (0, 2, 1)), (ROWS, SIZE))
