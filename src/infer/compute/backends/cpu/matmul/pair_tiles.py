"""The inner loop of BF16 weights × BF16 activations, by an instruction that adds the products of pairs: AVX512-BF16.

A pair is two neighbouring inputs. In BF16 weights, each lane of a vector has the pair of its row (`layouts`). An
activation record has the 16 pairs of its token. For each pair, row and token:

    sum = fma(second weight, second activation, sum), then fma(first weight, first activation, sum)

Both are rounded to nearest, ties to even, and subnormal numbers count as 0 (Intel's manual, VDPBF16PS). Even and odd
pairs form one chain each, added at the end, for every number of columns. So a row's result has one order of sums.
"""

from llvmlite.ir import IRBuilder as Builder
from numba.core import cgutils

from infer.compute.backends.cpu import simd
from infer.compute.backends.cpu.layouts import BLOCK, LANES, Layout
from infer.compute.backends.cpu.matmul.vector_tiles import Operands, num_chains, total_of, zeros
from infer.compute.backends.cpu.simd import I32, I32X16, Value, load


def emit_pair_tile(b: Builder, layout: Layout, columns: int, operands: Operands) -> list[list[Value]]:
    """Emit a tile of BF16 weights × BF16 activations, and return its sums, f32 × 16 rows by group and column.

    It reads packed groups, [in_features / 2, 16 rows, 2] of BF16, aligned to 64 bytes, and records of 32 BF16 per
    token, `operands.stride` bytes apart. Nothing is written to memory.
    """
    weights, activations, stride, num_records = operands
    sums = [zeros(b, columns, operands) for _ in range(num_chains(layout))]
    with cgutils.for_range(b, num_records) as loop:
        inputs = b.add(activations, b.mul(loop.index, stride))
        past = simd.multiply(b, loop.index, layout.record_bytes)
        places = [b.add(where, past) for where in weights]
        for pair in range(BLOCK // 2):
            chain = sums[pair % len(sums)]
            of_rows = [load(b, simd.offset(b, place, 4 * LANES * pair), I32X16, 64) for place in places]
            for column in range(columns):
                of_token = load(b, simd.offset(b, inputs, 2 * BLOCK * column + 4 * pair), I32, 4)
                x = simd.splat(b, of_token)
                for weight, slots in zip(of_rows, chain, strict=True):
                    b.store(simd.dot_bf16(b, b.load(slots[column]), weight, x), slots[column])
    return total_of(b, sums)
