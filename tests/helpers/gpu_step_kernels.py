"""Compiles the kernels of a step besides its products and attention: rotation, `advance`, `accept`, `take`."""

from collections.abc import Iterator
from typing import Any

import triton.language as tl
from triton.compiler import CompiledKernel

from gpu_attention_code import blocks
from gpu_compiler import code_of, compiled
from infer.compute.backends.cuda.attention_items import Items
from infer.compute.backends.cuda.rotation import Columns, Rotation, rotate_append
from infer.compute.backends.cuda.sampling.after_sampling import accept_rows, advance_rows, take_tokens
from infer.compute.quantization.kv_formats import KV_TYPES

_ADVANCE = {
    **dict.fromkeys(("sampled", "tokens", "positions", "control", "generated", "fields", "lengths"), "*i64!"),
    **dict.fromkeys(("seen", "last", "counts"), "*i32!"),
    **dict.fromkeys(("max_rows", "capacity", "vocab_size"), "i32"),
    "ROWS": 64, "HAS_HISTORY": True,
}  # fmt: skip
_ACCEPT = {
    **_ADVANCE, **dict.fromkeys(("drafts", "starts", "token_ids"), "*i64!"), "occurrences": "*i32!", "counts": "*i64!",
    "LINES": 64,
}  # fmt: skip

_TAKE = {**dict.fromkeys(("tokens", "starts", "token_ids"), "*i64!"), "size": "i32", "BLOCK": 128}


def rotation_kernel(kv_type: str, dim: int, target: int, *, is_unusual: bool = False) -> CompiledKernel:
    """Return the kernel for 32 query heads and 8 key heads.

    An unusual one has norms of values, scaled queries and gates.
    """
    flags = (tl.constexpr(is_unusual),) * 2
    columns = Columns(*map(tl.constexpr, ((80 if is_unusual else 48) * dim, 0, 32 * dim, 40 * dim, True)))
    rotation = Rotation(
        "*fp32!", "*fp32!", "fp32", "fp32", "*fp32!", "*fp32!", "i32!", "i32", "*i64!", "i32", "fp32", "*fp32!", *flags
    )
    arguments = {
        **dict.fromkeys(("qkv", "near", "far"), "*fp32!"), "rows": "*i64!", "positions": "*i64!",
        "cache": blocks(kv_type), "items": Items("*i32!", "*i32!"), "capacity": "i32", "num_slots": "i32",
        "rotation": rotation, "columns": columns,
        "NUM_HEADS": 32, "KV_HEADS": 8, "GROUP_SIZE": 4, "DIM": dim, "SIZE": dim, "HALF": dim // 2, "Q_NORM": 1,
        "K_NORM": 1, "KV_TYPE": KV_TYPES.index(kv_type), "HAS_FAR": False, "SPLITS": 64, "TILE": 4,
    }  # fmt: skip
    return compiled(rotate_append, arguments, target, num_warps=4)


def step_code() -> Iterator[tuple[str, dict[str, Any]]]:
    for kv_type in ("bf16", "q4"):
        yield f"rotate {kv_type} 90", code_of(rotation_kernel(kv_type, 128, 90))
    yield "rotate unusual 90", code_of(rotation_kernel("bf16", 128, 90, is_unusual=True))
    yield "advance 90", code_of(compiled(advance_rows, _ADVANCE, 90, num_warps=1))
    yield "accept 90", code_of(compiled(accept_rows, _ACCEPT, 90, num_warps=1))
    yield "take 90", code_of(compiled(take_tokens, _TAKE, 90, num_warps=1))
