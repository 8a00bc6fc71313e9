"""Float matrices times any number of tokens: one program per tile of some rows and some tokens.

Tensor cores multiply a weight of 16 bits with activations in planes of the same type. Products are exact, and sums are
float32. Rows of weights are the first operand, tokens the second. So a tile has as many tokens as a step needs, and an
instruction adds the same inputs of a token and a row in every tile.

The order of a sum depends on the type alone. A trip takes `DEPTH` inputs: their lowest plane first, then the planes
above. F16 has a sum per block of 32 inputs, whose scale then multiplies it. F32 is multiplied by the scalar units.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from infer.compute.backends.cuda.activations import BF16_PLANES, F16_PLANES, NUM_PLANES, is_none, lifted, store_planes
from infer.compute.backends.cuda.epilogue import biased, gated, store

DEPTHS = {0: 128, BF16_PLANES.value: 64, F16_PLANES.value: 64}  # inputs of a trip, by form
BYTES = {0: 4, BF16_PLANES.value: 2, F16_PLANES.value: 2}  # of a number, by form
MIN_PROGRAMS = 128  # below which a tile is too large: most GPUs have about as many multiprocessors
SHARED_BYTES = 232_448  # of a program, on an H100


class DenseTile(NamedTuple):
    ROWS: int
    TOKENS: int
    num_warps: int


FEW = DenseTile(64, 16, 4)
TILES = {  # by form, the largest first
    0: (DenseTile(32, 16, 4),),
    BF16_PLANES.value: (DenseTile(128, 64, 8), DenseTile(64, 32, 4), FEW),
    F16_PLANES.value: (DenseTile(128, 32, 8), FEW),  # the scales of more tokens would not fit the registers
}


def dense_tile(num_tokens: int, num_rows: int, form: int) -> DenseTile:
    """Return the largest tile that leaves enough programs."""
    *larger, smallest = TILES[form]
    for tile in larger:
        programs = triton.cdiv(num_tokens, tile.TOKENS) * triton.cdiv(num_rows, tile.ROWS)
        if num_tokens > smallest.TOKENS and programs >= MIN_PROGRAMS:
            return tile
    return smallest


def num_stages(tile: DenseTile, form: int, shared_bytes: int) -> int:
    """Return the number of trips that are loaded ahead.

    Registers allow two programs of four warps, or one of eight, so their memory is a multiprocessor's. `shared_bytes`
    are those that a program may have. GPUs with less than an H100's take a trip to registers before they multiply, so
    its memory is free. F32 has no use for more than 3.
    """
    stage = BYTES[form] * DEPTHS[form] * (tile.ROWS + NUM_PLANES[form] * tile.TOKENS)
    is_in_registers = shared_bytes < SHARED_BYTES
    programs, most = (2, 8) if tile.num_warps == 4 else (1, 4)
    return max(2, min(most if form else 3, shared_bytes // programs // stage + is_in_registers))


@triton.jit(do_not_specialize=["num_tokens"])
def dense(
    x, codes, y, left, num_tokens, num_inputs, num_blocks,
    PLANES: tl.constexpr, NUM_PLANES: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr, DEPTH: tl.constexpr,
    IS_WHOLE: tl.constexpr, GATE: tl.constexpr, LEAVES: tl.constexpr,
):  # fmt: skip
    """Store the products of a tile. With LEAVES, also store them in planes.

    A plane of a token has `num_blocks` blocks of 32. IS_WHOLE says that trips divide the inputs.
    """
    num_rows, width = y.num_rows, num_inputs if PLANES == 0 else num_blocks * 32
    token_tile, row_tile = _place(tl.cdiv(num_tokens, TOKENS), tl.cdiv(num_rows, ROWS))
    # Of 64 bits are only the addresses of tiles: those of each number would fill the registers.
    first_token, first_row = token_tile.to(tl.int64) * TOKENS, row_tile.to(tl.int64) * ROWS
    tokens, rows = tl.arange(0, TOKENS), tl.arange(0, ROWS)
    last_token, last_row = num_tokens - 1 - token_tile * TOKENS, num_rows - 1 - row_tile * ROWS
    read_tokens, read = tl.minimum(tokens, last_token), tl.minimum(rows, last_row)
    planes = x.codes + first_token * (NUM_PLANES * width) + read_tokens * (NUM_PLANES * width)
    if is_none(planes, num_tokens, TOKENS):
        sums = tl.full((ROWS, TOKENS), float("nan"), tl.float32)
    else:
        scales = x.scales + first_token * num_blocks + read_tokens * num_blocks
        weights = codes + first_row * num_inputs
        sums = weight_sums(
            planes, scales, weights, read, num_inputs, width, PLANES, NUM_PLANES, TOKENS, ROWS, DEPTH, IS_WHOLE
        )
        sums = biased(sums, y, (first_row + read)[:, None])
        if GATE != "":
            up = weight_sums(
                planes, scales, weights + num_rows.to(tl.int64) * num_inputs, read, num_inputs, width,
                PLANES, NUM_PLANES, TOKENS, ROWS, DEPTH, IS_WHOLE,
            )  # fmt: skip
            sums = gated(sums, biased(up, y, (first_row + num_rows + read)[:, None]), GATE)
    mask = (tokens <= last_token)[None, :] & (rows <= last_row)[:, None]
    store(y, first_token * y.stride + first_row, tokens[None, :] * y.stride + rows[:, None], sums, mask)
    if LEAVES:
        to = left.codes + first_token * (NUM_PLANES * num_rows) + first_row
        scales = left.scales + first_token * (num_rows // 32) + first_row // 32
        store_tile(to, scales, sums, tokens, tokens <= last_token, num_rows, last_row, PLANES, TOKENS, ROWS)


@triton.jit
def _place(token_tiles, row_tiles):
    """Return the tiles of the program. Neighbours share 8 tiles of tokens, so these stay in the cache."""
    program, per_group = tl.program_id(0), row_tiles * 8
    first = program // per_group * 8
    size = tl.minimum(token_tiles - first, 8)
    return first + program % per_group % size, program % per_group // size


@triton.jit
def weight_sums(
    planes, scales, weights, rows, num_inputs, width,
    PLANES: tl.constexpr, NUM_PLANES: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr, DEPTH: tl.constexpr,
    IS_WHOLE: tl.constexpr,
):  # fmt: skip
    """Return the tile's sums, float32 [ROWS, TOKENS]."""
    total = tl.zeros((ROWS, TOKENS), tl.float32)
    depth: tl.constexpr = 32 if PLANES == F16_PLANES else DEPTH  # of a sum
    inputs = tl.arange(0, depth)
    weights += rows[:, None] * num_inputs + inputs[None, :]
    planes = planes[None, :] + inputs[:, None]
    for start in range(0, num_inputs, DEPTH):
        for part in tl.static_range(DEPTH // depth):
            first = start + part * depth
            w = tl.load(weights, mask=(IS_WHOLE | (first + inputs < num_inputs))[None, :], other=0)
            part_sums = tl.zeros((ROWS, TOKENS), tl.float32) if PLANES == F16_PLANES else total
            for plane in tl.static_range(NUM_PLANES):
                at = planes + (NUM_PLANES - 1 - plane) * width
                a = tl.load(at, mask=(IS_WHOLE | (first + inputs < width))[:, None], other=0)
                part_sums = tl.dot(w, a, part_sums, input_precision="ieee")
            if PLANES == F16_PLANES:
                total = tl.fma(part_sums, tl.load(scales, mask=IS_WHOLE | (first < width), other=0)[None, :], total)
                scales += 1
            else:
                total = part_sums
            weights += depth
            planes += depth
    return total


@triton.jit
def store_tile(
    codes, scales, value, tokens, is_token, num_rows, last_row,
    PLANES: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Store value [ROWS, TOKENS], of which the rows are the next product's inputs, in planes.

    `codes` and `scales` point to the first row of token 0. Rows after `last_row`, counted in the tile, do not exist.
    """
    rows = tl.arange(0, ROWS)
    if PLANES == F16_PLANES:
        count: tl.constexpr = ROWS // 32
        value, scale = lifted(tl.reshape(value, (count, 32, TOKENS)), 1)
        value = tl.reshape(value, (ROWS, TOKENS))
        blocks, num_blocks = tl.arange(0, count), num_rows // 32
        is_block = is_token[None, :] & (blocks <= last_row // 32)[:, None]
        to = scales + tokens[None, :] * num_blocks + blocks[:, None]
        tl.store(to, tl.reshape(scale, (count, TOKENS)), mask=is_block)
    mask = is_token[None, :] & (rows <= last_row)[:, None]
    store_planes(codes, value, tokens[None, :], rows[:, None], num_rows, mask, PLANES)
