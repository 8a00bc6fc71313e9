"""`check_gpu`'s section on attention: values beside the CPU's reference, and the same bits for every chunk."""

import random
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from infer.compute.backends import cuda, reference
from infer.compute.operands.activation_values import Activations
from infer.compute.operands.step import Step
from infer.compute.operands.weights import Heads, Norm, RopeTable
from infer.compute.quantization.kv_formats import BLOCK_POSITIONS, KV_TYPES, key_block_bytes, value_block_bytes
from infer.compute.quantization.kv_layout import LayerCache, Pages

TOLERANCE = 1e-4  # of values about 1
PAGE_TOKENS = 64
SHAPES = [(32, 8, 64), (16, 8, 128), (9, 3, 64), (8, 4, 256), (12, 1, 96), (8, 1, 512)]
APART = (0, 2)  # each KV type takes two of the shapes: compiling all would take a minute


def make_heads(num_heads: int, kv_heads: int, dim: int, positions: int, device: torch.device) -> Heads:
    angles = torch.arange(positions)[:, None] / 10_000.0 ** torch.linspace(0, 1, dim // 2)
    rope = RopeTable(angles.cos()[None].to(device), angles.sin()[None].to(device))
    norm = Norm(torch.ones(dim, device=device), 1e-6)
    return Heads(num_heads, kv_heads, dim, dim**-0.5, rope, norm, norm)


def make_layer(heads: Heads, capacity: int, kv_type: str, device: torch.device, window: int, sinks: int) -> LayerCache:
    """Return the cache of one row. Every byte of its pages is 0xFF, so that unwritten values are NaN."""
    count = -(-capacity // PAGE_TOKENS)
    zeros, one = torch.zeros(1, dtype=torch.int64, device=device), torch.ones(1, dtype=torch.int64, device=device)
    pages = Pages(
        PAGE_TOKENS, torch.randperm(count, generator=torch.manual_seed(0))[None].to(device), zeros, one * sinks,
        one * window, zeros.clone(),
    )  # fmt: skip
    shape = heads.num_kv_heads, count, PAGE_TOKENS // BLOCK_POSITIONS
    keys, values = (
        torch.full((*shape, size(kv_type, heads.head_dim)), 0xFF, dtype=torch.uint8, device=device)
        for size in (key_block_bytes, value_block_bytes)
    )
    return LayerCache(kv_type, keys, values, pages)


def attend(qkv: Tensor, heads: Heads, layer: LayerCache, sizes: Sequence[int], ops: Any = cuda) -> Tensor:
    found, at = [], 0
    for size in sizes:
        step = Step.of([1] * size, at).to(qkv.device)
        found.append(ops.attend(Activations(qkv[at : at + size]), heads, layer, step).floats)
        at += size
    return torch.cat(found)


def check_attention(device: torch.device, is_tiny: bool) -> Iterator[dict[str, Any]]:
    """Check the values of every KV type and shape, with and without a window, then the bits of other chunks."""
    length, trials, shapes = (18, 1, [(2, 1, 32)]) if is_tiny else (600, 100, SHAPES)
    generator, host = random.Random(0), torch.device("cpu")
    for index, kv_type in enumerate(KV_TYPES):
        for num_heads, kv_heads, dim in dict.fromkeys(shapes[(index + apart) % len(shapes)] for apart in APART):
            heads, on_host = (make_heads(num_heads, kv_heads, dim, length, where) for where in (device, host))
            qkv = torch.randn(length, (num_heads + 2 * kv_heads) * dim, generator=torch.manual_seed(1))
            for window, sinks in ((0, 0), (length // 3, 5))[is_tiny:]:
                there, here = (
                    make_layer(each, length, kv_type, each.rope.cos.device, window, sinks) for each in (heads, on_host)
                )
                found = attend(qkv.to(device), heads, there, [length])
                apart = (found.cpu() - attend(qkv, on_host, here, [length], reference)).abs()
                error = float(apart.max() if kv_type == "f32" else apart.mean())  # roundings flip, a few
                what = {"type": f"{kv_type}, {num_heads}/{kv_heads} x {dim}, window {window}", "tokens": length}
                yield {"op": "attend", **what, "error": error, "is_right": error < TOLERANCE}
                wrong = 0
                for _ in range(trials):
                    sizes = _split(length, generator)
                    layer = make_layer(heads, length, kv_type, device, window, sinks)
                    wrong += not torch.equal(attend(qkv.to(device), heads, layer, sizes), found)
                yield {"op": f"attend, {trials} other chunks", **what, "error": wrong, "is_right": not wrong}


def _split(length: int, generator: random.Random) -> list[int]:
    sizes = list[int]()
    while sum(sizes) < length:
        sizes.append(min(generator.choice([1, 2, 3, 15, 16, 17, 64, 200]), length - sum(sizes)))
    return sizes
