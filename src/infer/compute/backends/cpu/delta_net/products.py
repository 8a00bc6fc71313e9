"""The inner loop of gated delta nets: rows × a matrix, added to sums in registers.

Each sum is one chain of FMAs in the order of the matrix's rows, in its own lane. It starts from the contents of memory
and ends there. So neither the tile's shape nor a cut between two matrices changes its bits.
"""

from llvmlite.ir import IRBuilder as Builder
from numba import njit, types
from numba.core import cgutils

from infer.compute.backends.cpu import simd
from infer.compute.backends.cpu.attention import registers
from infer.compute.backends.cpu.layouts import LANES
from infer.compute.backends.cpu.simd import Value, address, multiply, offset, operation, splat_f32, store_f32

_VECTOR_BYTES = 4 * LANES


@operation(types.void, *(address,) * 9)
def _add_products(
    b: Builder, num_rows: Value, x: Value, x_bytes: Value, m: Value, m_bytes: Value, depth: Value, out: Value,
    out_bytes: Value, num_vectors: Value,
) -> None:  # fmt: skip
    def rows(height: int, vectors: int, first: Value) -> None:
        xs, outs = [b.add(x, b.mul(first, x_bytes))], [b.add(out, b.mul(first, out_bytes))]
        for _ in range(height - 1):
            xs.append(b.add(xs[-1], x_bytes))
            outs.append(b.add(outs[-1], out_bytes))

        def tile(width: int, vector: Value) -> None:
            column = multiply(b, vector, _VECTOR_BYTES)
            places = [offset(b, b.add(each, column), _VECTOR_BYTES * v) for each in outs for v in range(width)]
            sums, start = registers.variables(b, [simd.load_f32(b, place) for place in places]), b.add(m, column)
            with cgutils.for_range(b, depth) as loop:
                row, element = b.add(start, b.mul(loop.index, m_bytes)), multiply(b, loop.index, 4)
                columns = [simd.load_f32(b, offset(b, row, _VECTOR_BYTES * v)) for v in range(width)]
                for index, each in enumerate(xs):
                    registers.add_products(b, sums[index * width :], simd.broadcast(b, b.add(each, element)), columns)
            registers.store_variables(b, sums, places)

        registers.for_each_vector(b, num_vectors, vectors, tile)

    registers.for_each_tile(b, num_rows, rows)


@njit
def add_products(num_rows, x, x_bytes, m, m_bytes, depth, out, out_bytes, num_vectors):
    """Add Σ_i x[row, i] × m[i] to out[row], for i < depth.

    x is f32 [num_rows, depth], m is [depth, 16 × num_vectors], and out is [num_rows, 16 × num_vectors]. Their rows are
    `x_bytes`, `m_bytes` and `out_bytes` apart. out is read and written, and must not overlap x or m.
    """
    _add_products(num_rows, x, x_bytes, m, m_bytes, depth, out, out_bytes, num_vectors)


@njit
def clear(where, num_rows, row_bytes, num_vectors):
    """Set the first `num_vectors` × 16 floats of each of `num_rows` rows to 0. The rows are `row_bytes` apart."""
    for row in range(num_rows):
        for at in range(where + row * row_bytes, where + row * row_bytes + _VECTOR_BYTES * num_vectors, _VECTOR_BYTES):
            store_f32(at, splat_f32(0))
