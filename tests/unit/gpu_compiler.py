"""Compiles every sampling kernel for an H100 or H200, which needs no GPU, and prints the assembly as JSON.

A program of its own: in the tests' process Triton interprets.
"""

import json
import sys

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from infer.backends.cuda import filtered, plain
from infer.backends.cuda.batch import Batch
from infer.backends.cuda.sampler import EXACT, tiling_of

POINTERS = {
    "scores": "*fp32", "score_ids": "*i32", "largests": "*fp32", "maxima": "*i32", "sums": "*i64",
    "gathered": "*i32", "token_ids": "*i64", "num_blocks": "i32",
}  # fmt: skip
NUM_BLOCKS, NUM_CHUNKS = 32, 8192


def compiled(kernel: triton.JITFunction, num_warps: int, logits: str, edits: int) -> str:
    batch = Batch(
        logits=logits, row_stride="i32", vocab_size="i32", fields="*i64", positions="*i64", allowed="*i32",
        allowed_stride="i32", masks="*i32", num_words="i32", bias_ids="*i64", biases="*fp64", end_ids="*i64",
        last="*i32", counts="*i32", lengths="*i64",
    )  # fmt: skip
    tiling = tiling_of(128_256)
    constants = {
        "BLOCK": tiling.block, "BLOCKS": NUM_BLOCKS, "CHUNK": tiling.chunk, "CHUNKS": NUM_CHUNKS,
        "CAPACITY": tiling.capacity, "EDITS": edits, "FILTERS": True,
    }  # fmt: skip
    names = kernel.arg_names
    signature = {"batch": batch, **POINTERS, **dict.fromkeys(constants, "constexpr")}
    source = ASTSource(
        kernel,
        signature={name: signature[name] for name in names},
        constexprs={(i,): constants[name] for i, name in enumerate(names) if name in constants},
    )
    target = GPUTarget("cuda", 90, 32)
    return str(triton.compile(source, target=target, options={"num_warps": num_warps, **EXACT}).asm["ptx"])


def main() -> None:
    tiling = tiling_of(128_256)
    assembly = {
        "score_blocks": compiled(plain.score_blocks, tiling.num_warps, "*bf16", 2),
        "choose_plain": compiled(plain.choose_plain, 4, "*fp32", 0),
        "weigh_blocks": compiled(filtered.weigh_blocks, tiling.num_warps, "*fp16", 1),
        "choose_filtered": compiled(filtered.choose_filtered, tiling.filter_warps, "*fp32", 0),
    }
    json.dump(assembly, sys.stdout)


if __name__ == "__main__":
    main()
