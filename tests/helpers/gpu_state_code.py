"""Compiles the kernels for layers with a state and returns facts of their code."""

from collections.abc import Iterator
from typing import Any

import triton.language as tl

from gpu_compiler import AMD, LEFT, TARGETS, code_of, compiled
from infer.compute.backends.cuda.delta_net import HEADS, TILE
from infer.compute.backends.cuda.delta_net_inputs import DeltaNetBuffers, Gates, multiply_keys, prepare_tokens
from infer.compute.backends.cuda.delta_net_recurrence import gate_heads, mix_runs
from infer.compute.backends.cuda.recurrent_pages import ConvPages, DeltaNetPages
from infer.compute.backends.cuda.short_conv import convolve_tokens

COLUMNS = 8  # of a program of `mix_runs`, outside of the interpreter
_PAGES = ConvPages("*fp32!", "i32!", "*i64!", "i32", tl.constexpr(64))
_BUFFERS = DeltaNetBuffers(*("*fp32!",) * 6, runs="*i32!")
_TOKENS = {**dict.fromkeys(("rows", "positions"), "*i64!"), "num_tokens": "i32", "num_runs": "i32"}


def arguments_of(dim: int) -> dict[str, Any]:
    """16 key heads and 32 value heads, as in Qwen3-Next and Qwen3.5 if `dim` is 128."""
    return _TOKENS | {
        **dict.fromkeys(("projected", "taps", "bias", "mixed", "z", "weight", "out"), "*fp32!"), "width": "i32!",
        "pages": DeltaNetPages(*_PAGES, *("*fp32!",) * 4), "buffers": _BUFFERS, "left": LEFT, "eps": "fp32",
        "gates": Gates("*fp32!", "*fp32!", "fp32", "fp32"), "KEY_HEADS": 16, "KEY_DIM": dim, "KEY_SIZE": dim,
        "VALUE_HEADS": 32, "VALUE_DIM": dim, "VALUE_SIZE": dim, "NUM_TAPS": 4, "TILE": TILE, "COLUMNS": COLUMNS,
        "ARE_TILED": False, "HEADS": HEADS, "LEAVES": 2, "CHANNELS": 2048, "HAS_BIAS": True, "BLOCKS": 8,
    }  # fmt: skip


def state_code(is_whole: bool) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield kernels of heads of 128, for one architecture also of 256. Those of AMD are only compiled."""
    for target in (*TARGETS, *(AMD if is_whole else ())):
        for dim in (128, 256) if is_whole or target == 90 else (128,):
            kernels = ((prepare_tokens, 4), (multiply_keys, dim // 32), (mix_runs, 1), (gate_heads, 4))
            found = [compiled(kernel, arguments_of(dim), target, num_warps=warps) for kernel, warps in kernels]
            if dim == 128:
                arguments = arguments_of(dim) | {"pages": _PAGES}
                found.append(compiled(convolve_tokens, arguments, target, num_warps=4))
            for kernel in found if isinstance(target, int) else ():
                yield f"{kernel.metadata.name} {dim} {target}", code_of(kernel)
