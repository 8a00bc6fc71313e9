"""The table look-up of every instruction set, compiled by LLVM: code of other machines can be read, but not run."""

import llvmlite.binding as llvm
import numpy as np
import pytest
from llvmlite import ir

from infer.compute.backends.cpu import simd
from infer.compute.backends.cpu.arithmetic import arithmetic_of
from infer.compute.backends.cpu.isa import BY_NAME, INSTRUCTION_SETS, usable_instruction_sets
from infer.compute.backends.cpu.simd import I32X16
from infer.compute.quantization.ggml_types import IQ4_VALUES
from machine_code import call_native

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
