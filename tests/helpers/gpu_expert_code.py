"""Compiles the kernels for experts and returns facts of their code."""

from collections.abc import Iterator
from typing import Any

import triton.language as tl
from triton.compiler import CompiledKernel

from gpu_compiler import AMD, LEFT, SHARED_BYTES, TARGETS, code_of, compiled, matrix_of, warps_of
from infer.compute.backends.cuda.activations import Quantized
from infer.compute.backends.cuda.dense import DEPTHS, FEW, num_stages
from infer.compute.backends.cuda.epilogue import Output
from infer.compute.backends.cuda.expert_choice import TILE, Tiles, choose_experts, fill_tiles, plan_tiles
from infer.compute.backends.cuda.expert_products import Stacks, add_pairs, expert_dense, expert_matmul, expert_matvec
from infer.compute.backends.cuda.float_planes import NUM_PLANES
from infer.compute.backends.cuda.matvec import MAX_LANES
from infer.compute.backends.cuda.projection import BLOCK_TILE, FORMS, MATMUL_TILE, MATVEC_TILE

Target = str | int


def pair_arguments(gate: str, *, has_bias: bool) -> dict[str, Any]:
    return {
        "experts": "*i32!", "tiles": Tiles("*i32!", "*i32!"), "per_line": "i32", "num_pairs": "i32", "left": LEFT,
        "y": Output("*fp32!", "i32!", "i32!", "*fp32", "fp32", *map(tl.constexpr, (has_bias, False, False))),
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
        "weights": "*fp32!", "counts": "*i32!", "num_experts": "i32!", "floor": "fp32", "scale": "fp32",
        "next_places": "*i32!", "num_tiles": "i32", "pairs": "*i32!", "num_pairs": "i32", "results": "*fp32!",
        "shared": "*fp32!", "shared_gates": "*fp32!", "residual": "*fp32!", "out": "*fp32!", "features": "i32!",
        "SCORES": tl.constexpr("softmax"), "CHOSEN": 8, "PLACES": 8, "SIZE": 128, "IS_NORMALIZED": True,
        "HAS_CORRECTION": True, "HAS_SCALES": True, "TILE": TILE, "AT_ONCE": 64, "PAIRS": 256, "HAS_WEIGHTS": True,
        "HAS_SHARED": True, "HAS_GATE": True, "ADD": True, "BLOCK": 1024,
    }  # fmt: skip
    for kernel, num_warps in ((choose_experts, 4), (plan_tiles, 8), (fill_tiles, 4), (add_pairs, 4)):
        yield compiled(kernel, arguments, target, num_warps=num_warps)


def expert_code(is_whole: bool) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the code of gated products for each architecture. The others are for one, unless `is_whole`."""
    makers = (("matvec", matvec_code, "Q4_0"), ("matmul", matmul_code, "Q4_0"), ("dense", dense_code, "BF16"))
    others = (("matvec", matvec_code, "MXFP4"), ("matmul", matmul_code, "Q4_K"), ("dense", dense_code, "F16"))
    for target in TARGETS:
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
