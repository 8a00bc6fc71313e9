"""Store scales in blocks of random bytes, wherever a type has them, and make weights of such blocks."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from infer.compute.operands.weights import StoredWeight
from infer.compute.quantization.ggml_types import BLOCK_FIELDS, BLOCK_TYPES

Bytes = NDArray[np.uint8]
FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def stored_weight(
    rng: np.random.Generator,
    type_: str,
    rows: int,
    columns: int,
    draw_values: Callable[[tuple[int, ...]], NDArray[Any]],
    draw_scales: Callable[[tuple[int, ...]], NDArray[Any]],
) -> StoredWeight:
    """Return a weight of random bits. A float type has the drawn values, and other types have the drawn scales."""
    if type_ in FLOATS:
        values = torch.from_numpy(draw_values((rows, columns)).astype(np.float32))
        return StoredWeight(type_, (rows, columns), values.to(FLOATS[type_]))
    kind = BLOCK_TYPES[type_]
    blocks = rng.integers(0, 256, (rows, columns // kind.block_size, kind.block_bytes), dtype=np.uint8)
    put_bytes(blocks, type_, rng)
    put_halves(blocks, type_, lambda: draw_scales((*blocks.shape[:2], 1)).astype(np.float16))
    return StoredWeight(type_, (rows, columns), torch.from_numpy(with_tails(blocks, type_, rng)))


def put_halves(blocks: Bytes, type_: str, draw: Callable[[], NDArray[np.float16]]) -> None:
    """Store a random f16, `[..., 1]`, as the scale of each block, and another one as its minimum, if it has one."""
    fields = BLOCK_FIELDS[type_]
    if fields.scale_form == "nibbles":
        bits = draw().view(np.uint16)[..., 0]
        for place in range(4):
            at = fields.scale_at + 2 * place + 1
            blocks[..., at] = blocks[..., at] & 15 | (bits >> 4 * place & 15) << 4
    elif fields.scale_form == "f16":
        for at in (fields.scale_at, fields.minimum_at):
            if at is not None:
                blocks[..., at : at + 2] = draw().view(np.uint8)


def put_bytes(blocks: Bytes, type_: str, rng: np.random.Generator) -> None:
    """Store scales of one byte, powers of two or E4M3 numbers, that are at most 1, and scales in f32."""
    form = BLOCK_FIELDS[type_].scale_form
    if form == "exponent":
        blocks[..., 0] = rng.integers(118, 128, blocks.shape[:-1])
    if form == "UE4M3":
        blocks[..., :4] = rng.integers(0, 0x40, (*blocks.shape[:-1], 4))
    if form == "f32":
        scales = rng.integers(1, 64, (*blocks.shape[:-1], 1)) / 4096
        blocks[..., :4] = scales.astype(np.float32).view(np.uint8)
        blocks[..., 4:] ^= (blocks[..., 4:] & 0x7F) == 0x7F  # no NaN


def with_tails(blocks: Bytes, type_: str, rng: np.random.Generator) -> Bytes:
    """Return the bytes of rows of blocks, `[rows, bytes]`: a scale ends each row of a type that has one."""
    rows, tail_bytes = blocks.reshape(len(blocks), -1), BLOCK_TYPES[type_].tail_bytes
    if not tail_bytes:
        return rows
    scales = rng.uniform(0.25, 1.0, (len(rows), 1)).astype(np.float32)
    return np.concatenate((rows, scales.view(np.uint8)), axis=1)
