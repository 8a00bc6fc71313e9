"""Compiles the kernels of a step besides its products: rotation, attention, `advance`, `accept`, `take`."""

from collections.abc import Iterator
from typing import Any

import triton.language as tl
from triton.compiler import CompiledKernel

from gpu_compiler import AMD, LEFT, code_of, compiled
from infer.backends.cuda.attention import KV_TYPES, ChunkParts, attend_chunks
from infer.backends.cuda.kv_blocks import Blocks
from infer.backends.cuda.rotation import Rotation, rotate_append
from infer.backends.cuda.sampling.after_sampling import accept_rows, advance_rows, take_tokens

_STORED = {"f32": "*fp32!", "f16": "*fp16!", "bf16": "*bf16!", "q8": "*i8!", "q4": "*i8!"}
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


def step_kernel(kernel: Any, kv_type: str, dim: int, target: str | int, *, is_split: bool = False) -> CompiledKernel:
    """32 heads on 8."""
    stored, sizes = _STORED[kv_type], ("i32!",) * 3
    scales = "*fp16!" if stored == "*i8!" else stored
    places = ("*i64!", "i32", tl.constexpr(64), "*i64!", "*i64!", "*i64!")
    arguments = {
        **dict.fromkeys(("qkv", "near", "far", "out"), "*fp32!"), "rows": "*i64!", "positions": "*i64!",
        "cache": Blocks(stored, scales, *sizes, stored, scales, *sizes, *places),
        "rotation": Rotation("*fp32!", "*fp32!", "fp32", "fp32", "*fp32!", "*fp32!", "i32!", "i32", "*i64!", "i32"),
        "parts": ChunkParts("*fp32!", "*fp32!", "*fp32!", "i32", "*i32!"), "arrivals": "*i32!",
        "num_tokens": "i32", "scale": "fp32", "softcap": "fp32",
        "left": LEFT, "LEAVES": 2,
        "NUM_HEADS": 32, "KV_HEADS": 8, "GROUP": 4, "GROUP_SIZE": 4, "QUERIES": 16, "DIM": dim, "SIZE": dim,
        "HALF": dim // 2, "Q_NORM": 1, "K_NORM": 1, "KV_TYPE": KV_TYPES.index(kv_type), "HAS_FAR": False,
        "HAS_SOFTCAP": False, "SPLIT": is_split,
    }  # fmt: skip
    return compiled(kernel, arguments, target, num_warps=4 if dim <= 64 else 8)


def step_code(is_whole: bool) -> Iterator[tuple[str, dict[str, Any]]]:
    cases = [("f16", 128, target, False) for target in (80, 89, 90, 120)]
    cases += [("f16", 64, 90, True), ("f32", 256, 90, False), ("q4", 128, 90, False)]
    if is_whole:
        cases += [(t, dim, 90, s) for t in _STORED for dim in (64, 128, 256) for s in (True, False)]
    for kv_type, dim, target, is_split in dict.fromkeys(cases):
        kernel = step_kernel(attend_chunks, kv_type, dim, target, is_split=is_split)
        name = f"attend {kv_type} {dim} {target}{' split' if is_split else ''}"
        yield name, code_of(kernel, is_listed=name == "attend f16 128 90")
    for kv_type in ("bf16", "q4"):
        yield f"rotate {kv_type} 90", code_of(step_kernel(rotate_append, kv_type, 128, 90))
    yield "advance 90", code_of(compiled(advance_rows, _ADVANCE, 90, num_warps=1))
    yield "accept 90", code_of(compiled(accept_rows, _ACCEPT, 90, num_warps=1))
    yield "take 90", code_of(compiled(take_tokens, _TAKE, 90, num_warps=1))
    for target in AMD:
        step_kernel(attend_chunks, "f16", 64, target)
