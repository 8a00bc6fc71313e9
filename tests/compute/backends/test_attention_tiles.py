"""Tiles of attention, compiled by LLVM for other CPUs: their sums stay in registers."""

import platform
import re

import pytest
from llvmlite import ir

from infer.compute.backends.cpu import simd
from infer.compute.backends.cpu.attention import registers
from infer.compute.backends.cpu.attention.cached_forms import KEYS, VALUES
from infer.compute.backends.cpu.attention.registers import tile_shapes, vector_registers
from infer.compute.backends.cpu.attention.tiles import emit_scores, emit_values
from infer.compute.backends.cpu.prefetch import Prefetch
from infer.compute.backends.cpu.simd import I64, constant, multiply
from machine_code import optimised_assembly

FEATURES = {
    "haswell": frozenset({"avx", "avx2", "fma", "f16c"}),
    "skylake-avx512": frozenset({"avx", "avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512vl", "avx512dq"}),
}


def loop_with_most_products(kind: str, cpu: str, width: int, vectors: int) -> list[str]:
    """Return the instructions of a tile's inner loop."""
    module = ir.Module()
    module.triple = "x86_64-unknown-linux-gnu"
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [I64] * 6), "tile")
    b = ir.IRBuilder(function.append_basic_block())
    operands, stored, dim, out, columns, count = function.args
    share = Prefetch.begin(b, stored).share(b, 64, width, columns)
    rows = [b.add(operands, multiply(b, dim, 4 * column)) for column in range(width)]
    places = [b.add(out, constant(I64, 1024 * column)) for column in range(width)]
    if kind == "scores":
        blocks = [b.add(stored, multiply(b, dim, 32 * block)) for block in range(vectors)]
        sums = emit_scores(b, KEYS["f16"], rows, blocks, dim, share)
        registers.store_variables(b, sums, [simd.offset(b, at, 64 * v) for at in places for v in range(vectors)])
    else:
        emit_values(b, VALUES["f16"], rows, stored, dim, constant(I64, 0), vectors, count, places, share)
    b.ret_void()
    code = optimised_assembly(str(module), module.triple, cpu)
    blocks = re.split(r"^\.L\w+:.*$", code, flags=re.MULTILINE)
    loop = max(blocks, key=lambda block: block.count("vfmadd"))
    return [line.strip() for line in loop.splitlines() if line.startswith("\t") and not line.startswith("\t.")]


@pytest.mark.parametrize("kind", ["scores", "values"])
@pytest.mark.parametrize("cpu", FEATURES)
def test_the_sums_of_the_widest_tiles_stay_in_registers(monkeypatch: pytest.MonkeyPatch, cpu: str, kind: str) -> None:
    for module in (simd, registers):
        monkeypatch.setattr(module, "target_features", lambda: FEATURES[cpu])
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    num_registers, num_floats = vector_registers()
    for width, vectors in tile_shapes(num_registers, num_floats)[:2]:
        loop = loop_with_most_products(kind, cpu, width, vectors)
        assert sum("vfmadd" in line for line in loop) % (width * vectors * 16 // num_floats) == 0
        assert not [line for line in loop if "(%rsp" in line or "(%rbp" in line]


@pytest.mark.parametrize(("num_registers", "num_floats"), [(32, 16), (16, 8), (32, 4), (16, 4)])
def test_tiles_take_any_number_of_columns_and_fit_the_registers(num_registers: int, num_floats: int) -> None:
    shapes = tile_shapes(num_registers, num_floats)
    widths = [width for width, _ in shapes]
    assert widths == sorted(widths, reverse=True)
    assert widths[-1] == 1
    assert all(width * vectors * 16 // num_floats <= 3 * num_registers // 4 for width, vectors in shapes)
