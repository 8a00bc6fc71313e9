"""Embeddings of tokens from a table that stays in its file: each piece of a row is read when a step needs it.

The table is read, not mapped: a map of a file that becomes shorter ends the process. What cannot be read is not a
number, so the rows of these tokens fail. The system keeps in memory what tokens often need.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite.ir import IRBuilder as Builder
from numba import njit, types

from infer.compute.backends.cpu.isa import BY_NAME
from infer.compute.backends.cpu.layouts import BLOCK, LANES, LAYOUTS
from infer.compute.backends.cpu.simd import I8, I32, I64, Value, address, operation, stack, store_scalar_f32
from infer.compute.backends.cpu.threads.atomics import call_system
from infer.compute.backends.cpu.weights.embed import make_read_float, make_read_unpacked
from infer.compute.backends.cpu.weights.pack_kernels import make_pack_block
from infer.compute.backends.cpu.weights.unpacking import make_unpack
from infer.compute.quantization.ggml_types import BLOCK_TYPES

_FLOATS = 1024  # of a piece


@operation(types.int64, types.int64, address, types.int64, types.int64)
def _read(b: Builder, descriptor: Value, to: Value, count: Value, offset: Value) -> Value:
    pointer = b.inttoptr(to, I8.as_pointer())
    return call_system(b, "pread", I64, b.trunc(descriptor, I32), pointer, count, offset)


@njit(forceinline=True)
def read_all(descriptor, to, count, offset):
    """Read bytes of a file, and return True if all were read."""
    done = 0
    while done < count:
        some = _read(descriptor, to + done, count - done, offset + done)
        if some <= 0:
            return False
        done += some
    return True


def make_embed_from_file(type_: str) -> Callable[..., None]:
    """Return the command that stores the tokens' rows × scale. Pieces of rows are divided among threads."""
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
    """Return store(piece, count, out, scale), which stores the values of some neighbouring blocks × scale.

    Blocks are packed as if they were rows, which is the form that is unpacked.
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
