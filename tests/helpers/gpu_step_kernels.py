"""Compiles the kernels of a step besides its products, and returns facts of their code.

These are attention, experts, layers with a state, rotation, `advance`, `accept` and `take`.
"""

import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

import triton
import triton.language as tl
from triton.compiler import CompiledKernel

from gpu_compiler import AMD, LEFT, SHARED_BYTES, TARGETS, code_of, compiled, cuobjdump, matrix_of, warps_of
from infer.compute.backends.cuda.activations import NUM_PLANES, Quantized
from infer.compute.backends.cuda.attention import tuning_of
from infer.compute.backends.cuda.attention_chunks import attend_chunks
from infer.compute.backends.cuda.attention_items import ChunkParts, Items, Results
from infer.compute.backends.cuda.delta_net import HEADS, gate_heads, mix_runs
from infer.compute.backends.cuda.delta_net import TILE as STATE_TILE
from infer.compute.backends.cuda.delta_net_inputs import (
    ConvInputs,
    ConvPages,
    DeltaNetBuffers,
    DeltaNetPages,
    Gates,
    NetSizes,
    convolve_tokens,
    multiply_keys,
    prepare_tokens,
)
from infer.compute.backends.cuda.dense import DEPTHS, FEW, num_stages
from infer.compute.backends.cuda.epilogue import Output
from infer.compute.backends.cuda.expert_choice import TILE, Tiles, choose_experts, fill_tiles, plan_tiles
from infer.compute.backends.cuda.expert_products import Stacks, add_pairs, expert_dense, expert_matmul, expert_matvec
from infer.compute.backends.cuda.kv_blocks import Blocks, Part
from infer.compute.backends.cuda.matmul import MAX_LANES
from infer.compute.backends.cuda.projection import BLOCK_TILE, FORMS, MATMUL_TILE, MATVEC_TILE
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

    An unusual one has norms after the rotation, norms of values, scaled queries and gates.
    """
    flags = (tl.constexpr(is_unusual),) * 2
    columns = Columns(*map(tl.constexpr, ((80 if is_unusual else 48) * dim, 0, 32 * dim, 40 * dim, True)))
    rotation = Rotation(
        "*fp32!", "*fp32!", "fp32", "fp32", "*fp32!", "*fp32!", "i32!", "i32", "*i64!", "i32", "fp32", "*fp32!", *flags
    )
    arguments = {
        **dict.fromkeys(("qkv", "near", "far"), "*fp32!"), "rows": "*i64!", "positions": "*i64!",
        "cache": blocks(kv_type), "items": Items("*i32!", "*i32!"),
        **dict.fromkeys(("num_planners", "capacity", "num_slots"), "i32"),
        "rotation": rotation, "columns": columns,
        "NUM_HEADS": 32, "KV_HEADS": 8, "GROUP_SIZE": 4, "DIM": dim, "SIZE": dim, "HALF": dim // 2,
        **dict.fromkeys(("Q_NORM", "K_NORM"), 3 if is_unusual else 1), "KV_TYPE": KV_TYPES.index(kv_type),
        "HAS_FAR": False, "SPLITS": 64, "TILE": 4,
    }  # fmt: skip
    return compiled(rotate_append, arguments, target, num_warps=4)


def step_code() -> Iterator[tuple[str, dict[str, Any]]]:
    for kv_type in ("bf16", "q4"):
        yield f"rotate {kv_type} 90", code_of(rotation_kernel(kv_type, 128, 90))
    yield "rotate unusual 90", code_of(rotation_kernel("bf16", 128, 90, is_unusual=True))
    yield "advance 90", code_of(compiled(advance_rows, _ADVANCE, 90, num_warps=1))
    yield "accept 90", code_of(compiled(accept_rows, _ACCEPT, 90, num_warps=1))
    yield "take 90", code_of(compiled(take_tokens, _TAKE, 90, num_warps=1))


STORED = {"f32": "*fp32!", "f16": "*fp16!", "bf16": "*bf16!", "q8": "*i8!", "q4": "*i8!"}
ADDRESS = re.compile(r"\s+/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?(.*?);")
BRANCH = re.compile(r"BRA(?:\.\w+)*\s+(?:!?U?P\w+,\s*)?(?:`\(\.L_x_\d+\)|0x([0-9a-f]+))")


def blocks(kv_type: str) -> Blocks:
    stored, sizes = STORED[kv_type], ("i32!",) * 3
    scales = "*fp16!" if stored == "*i8!" else stored
    part = Part(stored, scales, *sizes)
    return Blocks(part, part, "*i64!", "i32", tl.constexpr(64), "*i64!", "*i64!", "*i64!")


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
    """Yield kernels of each type of cache and each size of heads. Every architecture has some if `is_whole`."""
    cases = [("bf16", 128, 120), ("f16", 64, 89), ("bf16", 256, 90), ("q8", 128, 89), ("q4", 64, 90), ("f32", 128, 90)]
    if is_whole:
        cases += [(kv_type, dim, target) for kv_type in STORED for dim in (64, 128, 256) for target in (89, 90)]
        cases += [("f16", 80, 90), ("bf16", 96, 90), ("bf16", 128, 80)]
        for target in AMD:
            attention_kernel("f16", 64, target)
    for kv_type, dim, target in dict.fromkeys(cases):
        yield f"{kv_type} {dim} {target}", facts_of(attention_kernel(kv_type, dim, target))


def unusual_code(is_whole: bool) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield kernels of heads with sinks and gates, and of heads of 512 dimensions."""
    for kv_type, dim, target, curve in (("f16", 64, 89, "softplus"), ("bf16", 256, 90, "sigmoid")):
        kernel = attention_kernel(kv_type, dim, target, curve, has_sinks=True)
        yield f"{kv_type} {dim} {target} {curve}", facts_of(kernel)
    cases = [(kv_type, target) for kv_type in STORED for target in TARGETS] if is_whole else [("q8", 89), ("bf16", 90)]
    for kv_type, target in cases:
        yield f"{kv_type} 512 {target}", facts_of(attention_kernel(kv_type, 512, target))


def facts_of(kernel: CompiledKernel) -> dict[str, Any]:
    facts = code_of(kernel)
    found = {name: facts[name] for name in ("registers", "spilled", "instructions")}
    return found | {"turn": turn_of(kernel), "shared": kernel.metadata.shared}


Target = str | int


def pair_arguments(gate: str, *, has_bias: bool) -> dict[str, Any]:
    flags = map(tl.constexpr, (has_bias, False, False, ""))
    return {
        "experts": "*i32!", "tiles": Tiles("*i32!", "*i32!"), "per_line": "i32", "num_pairs": "i32", "left": LEFT,
        "y": Output("*fp32!", "i32!", "i32!", "*fp32", "fp32", *flags, "*fp32"),
        "GATE": tl.constexpr(gate), "LEAVES": gate != "", "PLANES": 2, "LANES": MAX_LANES,
    }  # fmt: skip


def stacks_of(weights: Any) -> Stacks:
    return Stacks(weights, weights, "*fp32", "i32", "i32")


def quantised_code(
    kernel: Any, unit: str, integers: str, tile: dict[str, int], type_: str, target: Target, gate: str
) -> CompiledKernel:
    arguments = pair_arguments(gate, has_bias=gate != "") | tile | {
        "x": Quantized(integers, "*fp32!", "*i32!"), "stacks": stacks_of(matrix_of(type_, unit)),
        "DP4A": isinstance(target, int),
    }  # fmt: skip
    return compiled(kernel, arguments, target, **warps_of(tile))


def matvec_code(type_: str, target: Target, gate: str = "") -> CompiledKernel:
    tile = BLOCK_TILE if gate else MATVEC_TILE
    return quantised_code(expert_matvec, "*i32!", "*i32!", tile, type_, target, gate)


def matmul_code(type_: str, target: Target, gate: str = "") -> CompiledKernel:
    tile = MATMUL_TILE | {"TOKENS": TILE}
    return quantised_code(expert_matmul, "*u8!", "*i8!", tile, type_, target, gate)


def dense_code(type_: str, target: Target, gate: str = "") -> CompiledKernel:
    form = FORMS[type_]
    planes = {"F16": "*fp16!", "BF16": "*bf16!"}[type_]
    forms = Quantized(planes, "*fp32!" if type_ == "F16" else planes, planes)
    arguments = pair_arguments(gate, has_bias=gate != "") | {
        "x": forms, "left": forms, "stacks": stacks_of(planes), "num_inputs": "i32!", "num_blocks": "i32!",
        "PLANES": form, "NUM_PLANES": NUM_PLANES[form], "TOKENS": FEW.TOKENS, "ROWS": FEW.ROWS,
        "DEPTH": DEPTHS[form], "IS_WHOLE": True,
    }  # fmt: skip
    stages = num_stages(FEW, form, SHARED_BYTES.get(target, 65_536))
    return compiled(expert_dense, arguments, target, num_warps=FEW.num_warps, num_stages=stages)


def small_code(target: Target) -> Iterator[CompiledKernel]:
    """Yield the code of the choice among 128 experts, the tiles and the sum, which read no weights."""
    arguments = {
        "logits": "*fp32!", "correction": "*fp32!", "expert_scales": "*fp32!", "experts": "*i32!",
        "weights": "*fp32!", "chosen": "*i32!", "num_experts": "i32!", "x": "*fp32!", "to": LEFT,
        "floor": "fp32", "scale": "fp32",
        "next_places": "*i32!", "num_tiles": "i32", "pairs": "*i32!", "num_pairs": "i32", "results": "*fp32!",
        "shared": "*fp32!", "shared_gates": "*fp32!", "residual": "*fp32!", "out": "*fp32!", "features": "i32!",
        "SCORES": tl.constexpr("softmax"), "CHOSEN": 8, "PLACES": 8, "SIZE": 128, "IS_NORMALIZED": True,
        "HAS_CORRECTION": True, "HAS_SCALES": True, "TILE": TILE, "PAIRS": 256, "HAS_WEIGHTS": True,
        "HAS_SHARED": True, "HAS_GATE": True, "ADD": True, "BLOCK": 1024, "PLANES": 2, "BLOCKS": 32,
    }  # fmt: skip
    for kernel, num_warps in ((choose_experts, 4), (plan_tiles, 8), (fill_tiles, 4), (add_pairs, 4)):
        yield compiled(kernel, arguments, target, num_warps=num_warps)


def expert_code(is_whole: bool) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the code of gated products for two architectures, or all if `is_whole`. The others are for one, or all."""
    makers = (("matvec", matvec_code, "Q4_0"), ("matmul", matmul_code, "Q4_0"), ("dense", dense_code, "BF16"))
    others = (("matvec", matvec_code, "MXFP4"), ("matmul", matmul_code, "Q4_K"), ("dense", dense_code, "F16"))
    for target in TARGETS if is_whole else (80, 90):
        for name, make, type_ in (*makers, *(others if is_whole or target == 90 else ())):
            yield f"{name} {type_} gated {target}", code_of(make(type_, target, "silu"))
            if is_whole or target == 90:
                yield f"{name} {type_} {target}", code_of(make(type_, target))
        for kernel in small_code(target) if is_whole or target == 90 else ():
            yield f"{kernel.metadata.name} {target}", code_of(kernel)
    for target in AMD if is_whole else AMD[:1]:
        for _, make, type_ in makers:
            make(type_, target)
        list(small_code(target))


COLUMNS = 8  # of a program of `mix_runs`, outside of the interpreter
_PAGES = ConvPages("*fp32!", "i32!", "*i64!", "i32", tl.constexpr(64))
_BUFFERS = DeltaNetBuffers(*("*fp32!",) * 6, runs="*i32!")
_TOKENS = {**dict.fromkeys(("rows", "positions"), "*i64!"), "num_tokens": "i32", "num_runs": "i32"}


def arguments_of(dim: int, channels: int) -> dict[str, Any]:
    """16 key heads and 32 value heads, as in Qwen3-Next and Qwen3.5 if `dim` is 128."""
    net = NetSizes(*map(tl.constexpr, (16, dim, dim, 32, dim, dim)))
    inputs = ConvInputs("*fp32!", "i32!", "*fp32!", "*i64!", "*i64!", *map(tl.constexpr, (channels, 4)))
    return _TOKENS | {
        **dict.fromkeys(("bias", "mixed", "z", "weight", "out"), "*fp32!"), "width": "i32!", "inputs": inputs,
        "pages": DeltaNetPages(*_PAGES, *("*fp32!",) * 4), "buffers": _BUFFERS, "left": LEFT, "eps": "fp32",
        "gates": Gates("*fp32!", "*fp32!", "fp32", "fp32"), "net": net,
        "TILE": STATE_TILE, "COLUMNS": COLUMNS, "ARE_TILED": False, "HEADS": HEADS, "LEAVES": 2, "HAS_BIAS": True,
        "BLOCKS": 8,
    }  # fmt: skip


def state_code(is_whole: bool) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield kernels of heads of 128, for one architecture also of 256. Those of AMD are only compiled."""
    for target in (*TARGETS, *AMD) if is_whole else (90, 120):
        for dim in (128, 256) if is_whole or target == 90 else (128,):
            kernels = ((prepare_tokens, 4), (multiply_keys, dim // 32), (mix_runs, 1), (gate_heads, 4))
            found = [
                compiled(kernel, arguments_of(dim, 64 * dim), target, num_warps=warps) for kernel, warps in kernels
            ]
            if dim == 128:
                arguments = arguments_of(dim, 2048) | {"pages": _PAGES}
                found.append(compiled(convolve_tokens, arguments, target, num_warps=4))
            for kernel in found if isinstance(target, int) else ():
                yield f"{kernel.metadata.name} {dim} {target}", code_of(kernel)
