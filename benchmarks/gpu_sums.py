"""`check_gpu`'s section on tensor cores: does a sum have the same bits in tiles of other sizes?

Kernels of one size for each number of tokens would be faster. A token's bits must not depend on its neighbours, so this
needs instructions of different shapes to add products in the same order. Only a device can show this. The section
compares a million random sums per pair of tiles. On Hopper, tiles of 64 rows become wgmma, and tiles of 16 rows
mma.sync.
"""

from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

TILES = ((64, 16), (64, 32), (64, 64), (64, 128), (64, 256), (128, 128), (16, 16), (16, 64))  # rows × tokens
DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16, "tf32": torch.float32}


@triton.jit
def tile_products(w, x, y, num_inputs, num_tokens, ROWS: tl.constexpr, TOKENS: tl.constexpr, DEPTH: tl.constexpr):
    """Store y = w xᵀ, float32 [rows, tokens]. All sizes are multiples of the tile's."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    tokens = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    total = tl.zeros((ROWS, TOKENS), tl.float32)
    for start in range(0, num_inputs, DEPTH):
        inputs = start + tl.arange(0, DEPTH)
        a = tl.load(w + rows[:, None] * num_inputs + inputs[None, :])
        b = tl.load(x + tokens[None, :] * num_inputs + inputs[:, None])
        total = tl.dot(a, b, total, input_precision="tf32")
    tl.store(y + rows[:, None] * num_tokens + tokens[None, :], total)


def products(w: Tensor, x: Tensor, rows: int, tokens: int, depth: int) -> Tensor:
    y = torch.empty(len(w), len(x), device=w.device)
    grid = len(w) // rows, len(x) // tokens
    tile_products[grid](w, x, y, w.shape[1], len(x), ROWS=rows, TOKENS=tokens, DEPTH=depth, num_warps=4)
    return y


def operand(rows: int, columns: int, seed: int, name: str, is_wide: bool, device: torch.device) -> Tensor:
    """Return random values, of very different sizes if `is_wide`. Those of tf32 have its ten bits."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(rows, columns, generator=generator)
    if is_wide:
        values *= 2.0 ** torch.randint(-6, 7, (rows, columns), generator=generator)
    if name == "tf32":
        values = (values.view(torch.int32) & -(1 << 13)).view(torch.float32)
    return values.to(DTYPES[name]).to(device)


def compare_sums(device: torch.device, is_tiny: bool) -> Iterator[dict[str, Any]]:
    """Yield how many sums differ from those of the first tile, per type of operands and tile."""
    rows, tokens, columns, depth, tiles = (64, 32, 64, 32, TILES[:2]) if is_tiny else (2048, 512, 2048, 64, TILES)
    for name in list(DTYPES)[device.type == "cpu" :]:  # Triton's interpreter multiplies bf16 as integers
        for is_wide in (False, True):
            w, x = (operand(size, columns, size, name, is_wide, device) for size in (rows, tokens))
            exact = w.double() @ x.double().T
            expected = products(w, x, *tiles[0], depth)
            for tile in tiles:
                what = {"op": "sums", "type": name, "is_wide": is_wide, "tile": list(tile), "beside": list(tiles[0])}
                try:
                    found = products(w, x, *tile, depth)
                except Exception as error:  # a tile may need more registers than a program has
                    yield what | {"error": f"{type(error).__name__}: {str(error)[:200]}"}
                    continue
                error = float((found - exact).abs().max() / exact.abs().max())
                differ = int((found.view(torch.int32) != expected.view(torch.int32)).sum())
                yield what | {"differ": differ, "of": found.numel(), "error": error}
