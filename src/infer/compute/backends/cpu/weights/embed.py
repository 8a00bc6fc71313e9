"""Embeddings of tokens: rows read from packed groups, or from a table that stays in its file.

A token outside a packed table gets the nearest row in it.

A table in a file is read, not mapped: a map of a file that becomes shorter ends the process. Each piece of a row is
read when a step needs it. What cannot be read is not a number, so the rows of these tokens fail. The system keeps in
memory what tokens often need.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
from llvmlite.ir import IRBuilder as Builder
from numba import njit, types

from infer.compute.backends.cpu.activations import inverse_rms
from infer.compute.backends.cpu.isa import BY_NAME
from infer.compute.backends.cpu.layouts import BLOCK, LANES, LAYOUTS, QUADS_BYTES, Layout, number_at
from infer.compute.backends.cpu.simd import (
    E4M3_BY_HALF,
    I8,
    I32,
    I64,
    Value,
    address,
    half_of_e4m3,
    load_i8,
    load_scalar_f32,
    load_u8,
    load_u16,
    operation,
    stack,
    store_scalar_f32,
    widen_bf16,
    widen_f16,
)
from infer.compute.backends.cpu.threads.atomics import call_system
from infer.compute.backends.cpu.weights.pack_kernels import make_pack_block
from infer.compute.backends.cpu.weights.unpacking import make_unpack
from infer.compute.quantization.ggml_types import BLOCK_TYPES

place = njit(forceinline=True)(number_at)


@njit(forceinline=True)
def _row_of(args, state, token):
    """Return (address of the packed group with a token's row, the row's lane in it, address of the token's output)."""
    row = min(max(state.tokens[token], 0), args.num_rows - 1)
    return args.table + row // LANES * args.group_bytes, row % LANES, args.out + 4 * args.in_features * token


@njit
def _normalize(args, out):
    """Divide f32 [in_features] at `out` by their root mean square, in place, unless `norm_eps` is negative."""
    if args.norm_eps >= 0:
        factor = inverse_rms(out, args.in_features, args.norm_eps)
        for i in range(args.in_features):
            store_scalar_f32(out + 4 * i, load_scalar_f32(out + 4 * i) * factor)


def make_embed(type_: str, inputs: int) -> Callable[..., None]:
    """Return the command that stores the tokens' rows × scale. Tokens are divided among threads.

    It reads packed groups at `table` and the ids in `state.tokens`, and writes f32 [tokens, in_features] at `out`.
    `inputs` is the instruction set's: 4 or 8 neighbouring inputs of a row.
    """
    layout = LAYOUTS[type_]
    if layout.is_float:
        return _make_embed_scaled_floats(layout) if layout.super_header else _make_embed_floats(layout)
    unpack, read = (
        make_unpack(layout, replace(BY_NAME["portable"], inputs=inputs)),
        make_read_unpacked(layout, is_interleaved=inputs == 8),
    )
    per_super, record_bytes = layout.records_per_super, layout.unpacked_bytes
    buffer_bytes, has_row_scales = per_super * record_bytes, layout.row_scale_bytes > 0

    def embed(args, state, thread, num_threads):
        buffer = stack(buffer_bytes)
        for token in range(thread, state.num_tokens, num_threads):
            group, lane, out = _row_of(args, state, token)
            row_scale = np.float32(1)
            if has_row_scales:
                row_scale = load_scalar_f32(group + args.group_bytes - 4 * (LANES - lane))
            for first in range(0, args.in_features, BLOCK * per_super):
                unpack(group, first // BLOCK, per_super, buffer)
                for i in range(BLOCK * per_super):
                    value = read(buffer + i // BLOCK * record_bytes, lane, i % BLOCK)
                    store_scalar_f32(out + 4 * (first + i), value * row_scale * args.scale)
            _normalize(args, out)

    return embed


def make_read_unpacked(layout: Layout, *, is_interleaved: bool = False) -> Any:
    """Return read(record, lane, within), which reads one number of an unpacked record as f32.

    It is input `within`, 0 to 31, of row `lane`.

    `is_interleaved` says that the record's quads are those of an instruction for 8 inputs.
    """
    has_minimum, parts = layout.has_minimum, layout.parts

    @njit(forceinline=True)
    def read(record, lane, within):
        at = 64 * (within // 4) + 4 * lane + within % 4
        if is_interleaved:
            at = 128 * (within // 8) + 8 * lane + within % 8
        scale_at = record + QUADS_BYTES + 4 * (within * parts // BLOCK * LANES + lane)
        value = load_scalar_f32(scale_at) * np.float32(load_i8(record + at))
        if has_minimum:
            value += load_scalar_f32(scale_at + 4 * LANES * parts)
        return value

    return read


def make_read_float(layout: Layout) -> Any:
    """Return read(at), which loads one number of a float type as f32."""
    if layout.low_bits == 32:
        return load_scalar_f32
    is_f16 = layout.type == "F16"

    @njit(forceinline=True)
    def read(at):
        return widen_f16(load_u16(at)) if is_f16 else widen_bf16(load_u16(at))

    return read


def _make_embed_floats(layout: Layout) -> Callable[..., None]:
    width, neighbours, read = layout.low_bits // 8, layout.neighbours, make_read_float(layout)

    def embed(args, state, thread, num_threads):
        for token in range(thread, state.num_tokens, num_threads):
            group, lane, out = _row_of(args, state, token)
            for i in range(args.in_features):
                store_scalar_f32(out + 4 * i, read(group + place(i, lane, neighbours, width)) * args.scale)
            _normalize(args, out)

    return embed


def _make_embed_scaled_floats(layout: Layout) -> Callable[..., None]:
    header, super_bytes, per_super = layout.super_header, layout.super_bytes, layout.records_per_super * BLOCK

    def embed(args, state, thread, num_threads):
        for token in range(thread, state.num_tokens, num_threads):
            group, lane, out = _row_of(args, state, token)
            for i in range(args.in_features):
                base = group + i // per_super * super_bytes
                scale = load_scalar_f32(base + 4 * lane) * np.float32(E4M3_BY_HALF)
                value = widen_f16(half_of_e4m3(load_u8(base + header + i % per_super * LANES + lane)))
                store_scalar_f32(out + 4 * i, value * scale * args.scale)
            _normalize(args, out)

    return embed


_FLOATS = 1024  # of a piece


@operation(types.int64, types.int64, address, types.int64, types.int64)
def _read(b: Builder, descriptor: Value, to: Value, count: Value, offset: Value) -> Value:
    pointer = b.inttoptr(to, I8.as_pointer())
    return call_system(b, "pread", I64, b.trunc(descriptor, I32), pointer, count, offset)


@njit(forceinline=True)
def read_all(descriptor, to, count, offset):
    """Read `count` bytes of a file at `offset` to the address `to`.

    Return False if the file ends or an error occurs.
    """
    done = 0
    while done < count:
        some = _read(descriptor, to + done, count - done, offset + done)
        if some <= 0:
            return False
        done += some
    return True


def make_embed_from_file(type_: str) -> Callable[..., None]:
    """Return the command that stores the tokens' rows × scale, read from a file.

    Pieces of rows are divided among threads.

    It reads the blocks of each token's row from the file `descriptor` at `offset`, and writes f32 [tokens, in_features]
    at `out`. A piece that cannot be read is filled with NaN.
    """
    kind = BLOCK_TYPES[type_]
    is_float = LAYOUTS[type_].is_float
    piece_blocks = _FLOATS if is_float else LANES
    block_size, block_bytes = kind.block_size, kind.block_bytes
    piece_bytes, store_piece = piece_blocks * block_bytes, _make_store_piece(type_)

    def embed(args, state, thread, num_threads):
        piece = stack(piece_bytes)
        num_blocks = args.in_features // block_size
        per_row = (num_blocks + piece_blocks - 1) // piece_blocks
        for index in range(thread, state.num_tokens * per_row, num_threads):
            token, first = index // per_row, index % per_row * piece_blocks
            row, count = min(max(state.tokens[token], 0), args.num_rows - 1), min(piece_blocks, num_blocks - first)
            offset = args.offset + row * args.row_bytes + first * block_bytes
            out = args.out + 4 * (args.in_features * token + first * block_size)
            if read_all(args.descriptor, piece, count * block_bytes, offset):
                store_piece(piece, count, out, args.scale)
            else:
                for i in range(count * block_size):
                    store_scalar_f32(out + 4 * i, np.float32(np.nan))

    return embed


def _make_store_piece(type_: str) -> Any:
    """Return store(piece, count, out, scale), which stores the values of `count` neighbouring blocks × scale, in f32.

    Blocks are packed as if they were rows of a group, because groups can be unpacked.
    """
    layout, block_bytes = LAYOUTS[type_], BLOCK_TYPES[type_].block_bytes
    if layout.is_float:
        read_float = make_read_float(layout)

        @njit(forceinline=True)
        def store_floats(piece, count, out, scale):
            for i in range(count):
                store_scalar_f32(out + 4 * i, read_float(piece + block_bytes * i) * scale)

        return store_floats
    pack, unpack, read = make_pack_block(layout), make_unpack(layout, BY_NAME["portable"]), make_read_unpacked(layout)
    num_records, record_bytes = layout.per_block, layout.unpacked_bytes
    packed_bytes, unpacked_bytes = layout.group_bytes(BLOCK * num_records), num_records * record_bytes

    @njit(forceinline=True)
    def store_blocks(piece, count, out, scale):
        packed, unpacked = stack(packed_bytes), stack(unpacked_bytes)
        for lane in range(count):
            pack(piece + lane * block_bytes, packed, lane)
        unpack(packed, 0, num_records, unpacked)
        for lane in range(count):
            for i in range(BLOCK * num_records):
                value = read(unpacked + i // BLOCK * record_bytes, lane, i % BLOCK)
                store_scalar_f32(out + 4 * (BLOCK * num_records * lane + i), value * scale)

    return store_blocks
