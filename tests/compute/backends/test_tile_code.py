"""Claims about the machine code of every tile, which is not run: its instructions per record, and its spills.

A tile of the wrong shape has spills, and so has a tile that a release of LLVM orders in another way.
"""

import re
from itertools import product

import pytest
from llvmlite import ir

from extent import IS_WHOLE
from infer.compute.backends.cpu import simd, weight_streams
from infer.compute.backends.cpu.isa import INSTRUCTION_SETS, InstructionSet, Shape
from infer.compute.backends.cpu.layouts import LAYOUTS
from infer.compute.backends.cpu.matmul import panels
from infer.compute.backends.cpu.matmul.vector_tiles import Operands
from infer.compute.backends.cpu.simd import I64
from machine_code import optimised_assembly

pytestmark = pytest.mark.slow

X86, ARM = "x86_64-unknown-linux-gnu", "aarch64-unknown-linux-gnu"
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


@pytest.mark.parametrize("cpu", CPUS)
def test_a_record_takes_few_instructions(cpu: str, monkeypatch: pytest.MonkeyPatch) -> None:
    isa, (multiply, count, limits) = set_of(cpu), CPUS[cpu][2]
    for planes, shape, most in zip((2, 2, 1), (Shape(1, 1, 1), isa.exact[0], isa.fast[0]), limits, strict=True):
        loop = loop_of(cpu, "Q4_1", planes, shape, monkeypatch)
        assert sum(line.startswith(multiply) for line in loop) == count * shape.groups * shape.columns * planes // 2
        assert len(loop) / (16 * shape.groups * shape.columns) <= most, (planes, shape)
