"""Compiles `attend_chunks` and returns facts of its code."""

import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

import triton
import triton.language as tl
from triton.compiler import CompiledKernel

from gpu_compiler import AMD, LEFT, code_of, compiled, cuobjdump
from infer.compute.backends.cuda.attention import tuning_of
from infer.compute.backends.cuda.attention_chunks import attend_chunks
from infer.compute.backends.cuda.attention_items import Items
from infer.compute.backends.cuda.attention_merge import ChunkParts
from infer.compute.backends.cuda.attention_results import Results
from infer.compute.backends.cuda.kv_blocks import Blocks
from infer.compute.quantization.kv_formats import KV_TYPES

STORED = {"f32": "*fp32!", "f16": "*fp16!", "bf16": "*bf16!", "q8": "*i8!", "q4": "*i8!"}
ADDRESS = re.compile(r"\s+/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?(.*?);")
BRANCH = re.compile(r"BRA(?:\.\w+)*\s+(?:!?U?P\w+,\s*)?(?:`\(\.L_x_\d+\)|0x([0-9a-f]+))")


def blocks(kv_type: str) -> Blocks:
    stored, sizes = STORED[kv_type], ("i32!",) * 3
    scales = "*fp16!" if stored == "*i8!" else stored
    return Blocks(
        stored, scales, *sizes, stored, scales, *sizes, "*i64!", "i32", tl.constexpr(64), "*i64!", "*i64!", "*i64!"
    )


def attention_kernel(
    kv_type: str, dim: int, target: str | int, curve: str = "", *, has_sinks: bool = False
) -> CompiledKernel:
    """Return the kernel for 32 query heads and 8 key heads."""
    results = Results("*fp32!", "*fp32!", *map(tl.constexpr, (96 * dim, 64 * dim, has_sinks, curve, False)))
    size, options = triton.next_power_of_2(dim), tuning_of(triton.next_power_of_2(dim), kv_type)
    arguments = {
        **dict.fromkeys(("near", "far", "out"), "*fp32!"), "rows": "*i64!", "positions": "*i64!",
        "cache": blocks(kv_type), "parts": ChunkParts("*fp32!", "*fp32!", "*fp32!"), "items": Items("*i32!", "*i32!"),
        "num_tokens": "i32", "scale": "fp32", "softcap": "fp32", "left": LEFT, "LEAVES": 2, "NUM_HEADS": 32,
        "GROUP": 4, "GROUP_SIZE": 4, "QUERIES": 16, "DIM": dim, "SIZE": size, "KV_TYPE": KV_TYPES.index(kv_type),
        "HAS_FAR": False, "HAS_SOFTCAP": False, "results": results, "STAGES": options.pop("STAGES"),
    }  # fmt: skip
    if isinstance(target, str):
        options.pop("maxnreg", None)
    return compiled(attend_chunks, arguments, target, **options)


def turn_of(kernel: CompiledKernel) -> dict[str, int]:
    """Return how often each instruction of the device occurs in one turn of the innermost loop that multiplies."""
    (listing,) = cuobjdump(kernel, "-sass")
    code = [(int(found[1], 16), found[2]) for line in listing.splitlines() if (found := ADDRESS.match(line))]
    index = {address: at for at, (address, _) in enumerate(code)}
    loops = [
        [name.split()[0] for _, name in code[index[to] : at + 1]]
        for at, (address, name) in enumerate(code)
        if (found := BRANCH.match(name)) and found[1] and (to := int(found[1], 16)) < address
    ]
    product = "HMMA" if "HMMA" in listing else "FFMA"
    inner = min((loop for loop in loops if any(name.startswith(product) for name in loop)), key=len)
    return dict(Counter(name.partition(".")[0] for name in inner))


def attention_code(is_whole: bool) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield kernels of each type of cache, each size of heads and each architecture, but not every product of them."""
    cases = [("bf16", 128, 80), ("bf16", 128, 120), ("f16", 64, 89), ("bf16", 256, 90), ("q8", 128, 89), ("q4", 64, 90)]
    cases += [("f32", 128, 90)]
    if is_whole:
        cases += [(kv_type, dim, target) for kv_type in STORED for dim in (64, 128, 256) for target in (89, 90)]
        cases += [("f16", 80, 90), ("bf16", 96, 90)]
        for target in AMD:
            attention_kernel("f16", 64, target)
    for kv_type, dim, target in dict.fromkeys(cases):
        yield f"{kv_type} {dim} {target}", facts_of(attention_kernel(kv_type, dim, target))


def unusual_code(is_whole: bool) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield kernels of heads with sinks and gates, and of heads of 512 dimensions."""
    for kv_type, dim, target, curve in (("f16", 64, 89, "softplus"), ("bf16", 256, 90, "sigmoid")):
        kernel = attention_kernel(kv_type, dim, target, curve, has_sinks=True)
        yield f"{kv_type} {dim} {target} {curve}", facts_of(kernel)
    cases = [("bf16", 80), ("f16", 90), ("q8", 89), ("bf16", 120)]
    cases += [(kv_type, target) for kv_type in STORED for target in (80, 89, 90, 120)] if is_whole else []
    for kv_type, target in dict.fromkeys(cases):
        yield f"{kv_type} 512 {target}", facts_of(attention_kernel(kv_type, 512, target))


def facts_of(kernel: CompiledKernel) -> dict[str, Any]:
    facts = code_of(kernel)
    found = {name: facts[name] for name in ("registers", "spilled", "instructions")}
    return found | {"turn": turn_of(kernel), "shared": kernel.metadata.shared}
