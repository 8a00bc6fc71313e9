"""Predict the times of one layer's products of Llama-3.2-1B on an H100, from the code that Triton compiles for it.

    python benchmarks/gpu_arithmetic.py

No GPU is needed or was used. A kernel takes as long as the slowest of these: reading its weights from memory, reading
its tiles from the L2 cache, its instructions, and the latency of the trips that are not loaded ahead.
"""

from math import ceil
from typing import NamedTuple

from harness import make_parser

MULTIPROCESSORS, CYCLES, BANDWIDTH = 132, 1755, 3.35e6  # cycles and bytes per microsecond
L2_BYTES, MAX_L2_BYTES = 28, 64  # per cycle and multiprocessor, if all multiprocessors read, and if few do
ALONE, TOGETHER = 1.6, 2.5  # cycles per instruction of one warp; instructions per cycle of many
LATENCY, RAMP = 0.9, 1.0  # microseconds of a load from memory, and of a launch
TENSOR = 2048  # products per cycle and multiprocessor, of 16 bits
SERIAL_BLOCK = 0.55  # microseconds of 32 inputs in a loop that loads nothing ahead
Q4_0 = 18 / 32  # bytes of a weight


class Matrix(NamedTuple):
    rows: int
    inputs: int
    halves: int = 1  # gate and up


class Kernel(NamedTuple):
    rows: int  # of a tile
    tokens: int
    depth: int  # inputs of a trip
    warps: int
    instructions: int  # of a trip and warp
    ahead: int  # trips
    weight_bytes: float
    activation_bytes: int
    per_multiprocessor: int
    planes: int = 0  # of 16 bits that tensor cores multiply


LAYER = (Matrix(3072, 2048), Matrix(2048, 2048), Matrix(8192, 2048, 2), Matrix(2048, 8192))
BEFORE = Kernel(32, 16, 128, 4, 361, 2, 2, 4, 3)
DENSE = (
    Kernel(128, 64, 64, 8, 135, 4, 2, 6, 1, 3),
    Kernel(64, 32, 64, 4, 143, 4, 2, 6, 2, 3),
    Kernel(64, 16, 64, 4, 117, 7, 2, 6, 4, 3),
)
MATMUL = Kernel(64, 16, 128, 4, 731, 3, Q4_0, 2, 4)
MATMUL_WIDE = Kernel(64, 32, 128, 4, 1051, 3, Q4_0, 2, 3)
MATVEC_BEFORE, MATVEC = 170, 169  # instructions of a warp for 2 rows and 32 blocks, with the sums of quads


def microseconds(matrix: Matrix, tokens: int, kernel: Kernel) -> float:
    programs = ceil(matrix.rows / kernel.rows) * ceil(tokens / kernel.tokens)
    together = min(kernel.per_multiprocessor, ceil(programs / MULTIPROCESSORS))
    turns = max(1.0, programs / MULTIPROCESSORS / together)
    read = kernel.rows * kernel.weight_bytes + min(kernel.tokens, max(4, tokens)) * kernel.activation_bytes
    l2 = min(MAX_L2_BYTES, L2_BYTES * MULTIPROCESSORS / min(programs, MULTIPROCESSORS))
    trip = max(
        kernel.instructions * ALONE / CYCLES,
        LATENCY / kernel.ahead,
        together * kernel.warps * kernel.instructions / TOGETHER / CYCLES,
        together * kernel.depth * read / l2 / CYCLES,
        together * kernel.rows * kernel.tokens * kernel.depth * kernel.planes / TENSOR / CYCLES,
    )
    return max(memory(matrix, kernel.weight_bytes), matrix.halves * ceil(matrix.inputs / kernel.depth) * trip * turns)


def memory(matrix: Matrix, weight_bytes: float) -> float:
    return matrix.rows * matrix.halves * matrix.inputs * weight_bytes / BANDWIDTH


def by_matvec(matrix: Matrix, tokens: int, instructions: int) -> float:
    units = matrix.rows * matrix.halves * matrix.inputs / 32 * tokens / 64
    return RAMP + max(memory(matrix, Q4_0), units * instructions / (TOGETHER * MULTIPROCESSORS * CYCLES))


def by_matmul(matrix: Matrix, tokens: int) -> float:
    return microseconds(matrix, tokens, MATMUL if matrix.halves == 2 or tokens <= MATMUL.tokens else MATMUL_WIDE)


def by_serial_matmul(matrix: Matrix, tokens: int) -> float:
    programs = ceil(matrix.rows / 64) * ceil(tokens / 32)
    return ceil(programs / MULTIPROCESSORS) * matrix.halves * matrix.inputs / 32 * SERIAL_BLOCK


def by_dense(matrix: Matrix, tokens: int) -> float:
    *larger, smallest = DENSE
    for kernel in larger:
        if tokens > 16 and ceil(tokens / kernel.tokens) * ceil(matrix.rows / kernel.rows) >= 128:
            return microseconds(matrix, tokens, kernel)
    return microseconds(matrix, tokens, smallest)


def main() -> None:
    make_parser(__doc__).parse_args()
    print("tokens  BF16 before  BF16  Q4_0 before  Q4_0  of Q4_0: matvec  matmul")
    for tokens in (1, 2, 4, 8, 9, 10, 12, 16, 24, 32, 48, 64, 512):
        before = sum(microseconds(matrix, tokens, BEFORE) for matrix in LAYER)
        dense = sum(by_dense(matrix, tokens) for matrix in LAYER)
        matvec = sum(by_matvec(matrix, tokens, MATVEC) for matrix in LAYER)
        matmul = sum(by_matmul(matrix, tokens) for matrix in LAYER)
        if tokens <= 8:
            quantised, then = matvec, sum(by_matvec(matrix, tokens, MATVEC_BEFORE) for matrix in LAYER)
        else:
            quantised, then = matmul, sum(by_serial_matmul(matrix, tokens) for matrix in LAYER)
        figures = (before, dense, then, quantised, matvec, matmul)
        print(f"{tokens:6}  {'  '.join(f'{figure:8.0f}' for figure in figures)}")


if __name__ == "__main__":
    main()
