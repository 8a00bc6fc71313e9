"""The code of every instruction set, compiled by LLVM: look-ups, and the tiles of attention and of products.

Code of other machines can be read, but not run. A tile of the wrong shape has spills, and so has a tile that a release
of LLVM orders in another way.
"""

import platform
import re
from itertools import product

import llvmlite.binding as llvm
import numpy as np
import pytest
from llvmlite import ir

from extent import IS_WHOLE
from infer.compute.backends.cpu import simd, weight_streams
from infer.compute.backends.cpu.arithmetic import arithmetic_of
from infer.compute.backends.cpu.attention import registers
from infer.compute.backends.cpu.attention.cached_forms import KEYS, VALUES
from infer.compute.backends.cpu.attention.registers import tile_shapes, vector_registers
from infer.compute.backends.cpu.attention.tiles import emit_scores, emit_values
from infer.compute.backends.cpu.isa import BY_NAME, INSTRUCTION_SETS, InstructionSet, Shape, usable_instruction_sets
from infer.compute.backends.cpu.layouts import LAYOUTS
from infer.compute.backends.cpu.matmul import panels
from infer.compute.backends.cpu.matmul.vector_tiles import Operands
from infer.compute.backends.cpu.prefetch import begin_region, make_loop_prefetch
from infer.compute.backends.cpu.simd import I32X16, I64, constant, multiply
from infer.compute.quantization.ggml_types import IQ4_VALUES
from machine_code import call_native, optimised_assembly

TABLE = [value + 128 for value in IQ4_VALUES]
X86, ARM = "x86_64-unknown-linux-gnu", "aarch64-unknown-linux-gnu"


def test_a_machine_without_any_of_them_has_the_portable_one() -> None:
    assert INSTRUCTION_SETS[-1].name == "portable"
    assert INSTRUCTION_SETS[-1] in usable_instruction_sets()


def look_up_module(name: str, table: list[int]) -> ir.Module:
    module = ir.Module()
    pointer = I32X16.as_pointer()
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [pointer]), "look_up")
    b = ir.IRBuilder(function.append_basic_block())
    b.store(arithmetic_of(BY_NAME[name]).look_up(b, b.load(function.args[0], align=1), table), function.args[0], 1)
    b.ret_void()
    return module


@pytest.mark.parametrize(
    ("name", "triple", "features", "instruction", "count"),
    [
        *((name, X86, "+avx512bw", "vpshufb", 1) for name in ("amx", "avx512vnni", "avx512")),
        *((name, X86, "+avx2", "vpshufb", 2) for name in ("avxvnni", "avx2")),
        ("amx", X86, "+avx512vbmi", "vpermb", 1),
        ("neon", ARM, "+dotprod", "tbl", 4),
    ],
)
def test_codes_are_looked_up_by_shuffles(
    name: str, triple: str, features: str, instruction: str, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(simd, "target_features", lambda: {features[1:]})
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    parsed = llvm.parse_assembly(f'target triple = "{triple}"\n{look_up_module(name, TABLE)}')
    parsed.verify()
    lines = llvm.Target.from_triple(triple).create_target_machine(features=features).emit_assembly(parsed).splitlines()
    assert sum(line.strip().startswith(instruction) for line in lines) == count


@pytest.mark.parametrize("table", [TABLE, [*range(200, 232)]], ids=["16", "32"])
@pytest.mark.parametrize("name", BY_NAME)
def test_every_code_becomes_its_value(name: str, table: list[int]) -> None:
    if BY_NAME[name] not in usable_instruction_sets():
        pytest.skip(f"hardware: a CPU with {name}")
    codes = np.random.default_rng(0).integers(0, 256, 64, dtype=np.uint8)  # bits above a table's number are ignored
    found = codes.copy()
    call_native(str(look_up_module(name, table)), "look_up", found.ctypes.data)
    assert found.tolist() == [table[code % len(table)] for code in codes]


FEATURES = {
    "haswell": frozenset({"avx", "avx2", "fma", "f16c"}),
    "skylake-avx512": frozenset({"avx", "avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512vl", "avx512dq"}),
}


def loop_with_most_products(kind: str, cpu: str, width: int, vectors: int) -> list[str]:
    """Return the instructions of a tile's inner loop."""
    module = ir.Module()
    module.triple = X86
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [I64] * 6), "tile")
    b = ir.IRBuilder(function.append_basic_block())
    operands, stored, dim, out, columns, count = function.args
    prefetch = make_loop_prefetch(b, begin_region(b, stored), 64, width, columns)
    rows = [b.add(operands, multiply(b, dim, 4 * column)) for column in range(width)]
    places = [b.add(out, constant(I64, 1024 * column)) for column in range(width)]
    if kind == "scores":
        blocks = [b.add(stored, multiply(b, dim, 32 * block)) for block in range(vectors)]
        sums = emit_scores(b, KEYS["f16"], rows, blocks, dim, prefetch)
        registers.store_variables(b, sums, [simd.offset(b, at, 64 * v) for at in places for v in range(vectors)])
    else:
        emit_values(b, VALUES["f16"], rows, stored, dim, constant(I64, 0), vectors, count, places, prefetch)
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


_AVX2 = {"avx2", "fma", "f16c"}
_AVX512 = _AVX2 | {"avx512f", "avx512bw"}
# The triple, and features that change the code. The instruction that multiplies, and its number for a record of Q4_1 ×
# a token in two planes. Then the number of all instructions for 32 weights × a token: two planes with one token, two
# with the widest tile, one with the widest tile.
CPUS = {
    "haswell": (X86, _AVX2, ("vpmaddubsw", 32, (9.0, 7.8, 4.3))),
    "alderlake": (X86, _AVX2 | {"avxvnni"}, ("{vex}", 32, (6.8, 5.7, 3.4))),
    "skylake-avx512": (X86, _AVX512, ("vpmaddubsw", 16, (5.3, 3.6, 2.15))),
    "icelake-server": (X86, _AVX512 | {"avx512vnni"}, ("vpdpbusd", 16, (3.7, 2.4, 1.7))),
    "neoverse-n1": (ARM, {"neon", "dotprod"}, ("sdot", 64, (10.2, 8.8, 5.0))),
    "apple-m1": (ARM, {"neon", "dotprod"}, ("sdot", 64, (10.2, 8.8, 5.0))),
    "neoverse-v1": (ARM, {"neon", "dotprod", "i8mm"}, ("usmmla", 32, (9.1, 7.7, 4.5))),
}
MOST_ON_STACK = {"Q4_1": 0.15, "Q4_K": 0.15, "Q8_0": 0.15, "Q6_K": 0.25, "F16": 0.15}  # of a loop's instructions


def loop_of(cpu: str, type_: str, planes: int, shape: Shape, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the instructions of the innermost loop, which multiplies one record."""
    triple, features, _ = CPUS[cpu]
    monkeypatch.setattr(simd, "target_features", lambda: frozenset(features))
    monkeypatch.setattr(weight_streams, "prefers_near", lambda: False)  # does not depend on this machine
    layout, isa = LAYOUTS[type_], set_of(cpu)
    module = ir.Module()
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [I64] * (shape.groups + 4)), "tile")
    b = ir.IRBuilder(function.append_basic_block())
    *weights, activations, stride, num_records, out = function.args
    operands = Operands(weights, activations, stride, num_records)
    panels.emit_tile(b, layout, isa.form(layout, planes), isa, shape, operands, out, None)
    b.ret_void()
    return innermost(optimised_assembly(f'target triple = "{triple}"\n{module}', triple, cpu))


def set_of(cpu: str) -> InstructionSet:
    return next(isa for isa in INSTRUCTION_SETS if CPUS[cpu][1] >= isa.needs)


def innermost(text: str) -> list[str]:
    """Return the shortest run of lines from a label to a jump back to it that has a float multiplication."""
    lines = [re.sub(r"\s+(//|#[^\d-]).*", "", line).strip() for line in text.splitlines()]
    places: dict[str, int] = {}
    loops = []
    for index, line in enumerate(lines):
        if label := re.fullmatch(r"(\.LBB\w+):", line):
            places[label[1]] = index
        jump = re.match(r"(?:b\.\w+|cbn?z|tbn?z|b|j\w+)\s.*?(\.LBB\w+)", line)
        if jump and jump[1] in places:
            body = [each for each in lines[places[jump[1]] : index + 1] if re.match(r"[a-z{]", each)]
            if any(re.match("fmla|vfmadd|fmul", each) for each in body):
                loops.append(body)
    return min(loops, key=len)


def on_stack(loop: list[str]) -> float:
    return sum(re.search(r"%r[sb]p|\[sp", line) is not None for line in loop) / len(loop)


TYPES = [*MOST_ON_STACK, "Q4_1"]  # two for each CPU, in turns


@pytest.mark.slow(rest=6)
@pytest.mark.parametrize(
    ("cpu", "type_"),
    [(cpu, type_) for at, cpu in enumerate(CPUS) for type_ in (TYPES[:5] if IS_WHOLE else TYPES[2 * (at % 3) :][:2])],
)
def test_tiles_stay_in_registers(cpu: str, type_: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layout, isa = LAYOUTS[type_], set_of(cpu)
    for planes, groups in product((1, 2), repeat=2):
        shape = isa.shapes(layout, isa.form(layout, planes), groups)[0]
        loop = loop_of(cpu, type_, planes, shape, monkeypatch)
        assert on_stack(loop) <= MOST_ON_STACK[type_], (shape, planes, len(loop))


@pytest.mark.slow
@pytest.mark.parametrize("cpu", CPUS)
def test_a_record_takes_few_instructions(cpu: str, monkeypatch: pytest.MonkeyPatch) -> None:
    isa, (multiply, count, limits) = set_of(cpu), CPUS[cpu][2]
    for planes, shape, most in zip((2, 2, 1), (Shape(1, 1, 1), isa.exact[0], isa.fast[0]), limits, strict=True):
        loop = loop_of(cpu, "Q4_1", planes, shape, monkeypatch)
        assert sum(line.startswith(multiply) for line in loop) == count * shape.groups * shape.columns * planes // 2
        assert len(loop) / (16 * shape.groups * shape.columns) <= most, (planes, shape)
