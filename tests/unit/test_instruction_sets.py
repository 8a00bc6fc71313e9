"""`dot4` and `look_up` of every instruction set, as LLVM compiles them: others' machines can be read, if not run."""

import ctypes

import llvmlite.binding as llvm
import numpy as np
import pytest
from llvmlite import ir

from infer.backends.cpu.arithmetic import Chained, arithmetic_of
from infer.backends.cpu.isa import BY_NAME, INSTRUCTION_SETS, target_features, usable_instruction_sets
from infer.backends.cpu.simd import I32, I32X16
from infer.quantization.ggml_types import IQ4_VALUES

X86, ARM = "x86_64-unknown-linux-gnu", "aarch64-unknown-linux-gnu"


def assembly(name: str, triple: str, features: str, *, is_small: bool) -> str:
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    module = ir.Module()
    pointer = I32X16.as_pointer()
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [pointer, pointer, I32]), "dot")
    b = ir.IRBuilder(function.append_basic_block())
    total, weights, four = function.args
    arithmetic = arithmetic_of(BY_NAME[name])
    assert isinstance(arithmetic, Chained)
    b.store(arithmetic.dot4(b, b.load(total), b.load(weights), four, is_small=is_small), total)
    b.ret_void()
    parsed = llvm.parse_assembly(f'target triple = "{triple}"\n{module}')
    parsed.verify()
    machine = llvm.Target.from_triple(triple).create_target_machine(features=features)
    return str(machine.emit_assembly(parsed))


@pytest.mark.parametrize(
    ("name", "triple", "features", "instruction", "count"),
    [
        ("avx512vnni", X86, "+avx512vnni,+avx512bw,+avx512vl", "vpdpbusd", 1),
        ("avxvnni", X86, "+avxvnni,+avx2", "{vex} vpdpbusd", 2),
        ("avx2", X86, "+avx2", "vpmaddwd", 4),
        ("neon", ARM, "+dotprod", "sdot", 4),
    ],
)
def test_the_dot_is_the_instruction_that_the_set_is_named_for(
    name: str, triple: str, features: str, instruction: str, count: int
) -> None:
    lines = [line.strip().replace("\t", " ") for line in assembly(name, triple, features, is_small=True).splitlines()]
    assert sum(line.startswith(instruction) for line in lines) == count


def test_sdot_takes_weights_of_eight_bits_as_three_products() -> None:
    lines = assembly("neon", ARM, "+dotprod", is_small=False).splitlines()
    assert sum(line.strip().startswith("sdot") for line in lines) == 12
    for weight in range(256):
        for activation in (-128, -1, 0, 127):
            signed = (weight ^ 0x80) - 256 * ((weight ^ 0x80) >= 128)
            assert signed * activation + 2 * 64 * activation == weight * activation


def test_a_machine_without_any_of_them_has_the_portable_one() -> None:
    assert INSTRUCTION_SETS[-1].name == "portable"
    assert INSTRUCTION_SETS[-1] in usable_instruction_sets()


def look_up_module(name: str) -> ir.Module:
    module = ir.Module()
    pointer = I32X16.as_pointer()
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [pointer]), "look_up")
    b = ir.IRBuilder(function.append_basic_block())
    table = [value + 128 for value in IQ4_VALUES]
    b.store(arithmetic_of(BY_NAME[name]).look_up(b, b.load(function.args[0], align=1), table), function.args[0], 1)
    b.ret_void()
    return module


@pytest.mark.parametrize(
    ("name", "triple", "features", "instruction", "count"),
    [
        ("amx", X86, "+avx512bw", "vpshufb", 1),
        ("avx512vnni", X86, "+avx512bw", "vpshufb", 1),
        ("avxvnni", X86, "+avx2", "vpshufb", 2),
        ("avx2", X86, "+avx2", "vpshufb", 2),
        ("neon", ARM, "+dotprod", "tbl", 4),
    ],
)
def test_codes_are_looked_up_by_shuffles(name: str, triple: str, features: str, instruction: str, count: int) -> None:
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    parsed = llvm.parse_assembly(f'target triple = "{triple}"\n{look_up_module(name)}')
    parsed.verify()
    lines = llvm.Target.from_triple(triple).create_target_machine(features=features).emit_assembly(parsed).splitlines()
    assert sum(line.strip().startswith(instruction) for line in lines) == count


@pytest.mark.parametrize("name", BY_NAME)
def test_every_code_becomes_its_value(name: str) -> None:
    if BY_NAME[name] not in usable_instruction_sets():
        pytest.skip(f"hardware: a CPU with {name}")
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    features = ",".join(f"+{feature}" for feature in sorted(target_features()))
    machine = llvm.Target.from_default_triple().create_target_machine(features=features)
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(str(look_up_module(name))), machine)
    engine.finalize_object()
    codes = np.random.default_rng(0).integers(0, 16, 64, dtype=np.uint8)
    found = codes.copy()
    ctypes.CFUNCTYPE(None, ctypes.c_void_p)(engine.get_function_address("look_up"))(found.ctypes.data)
    assert found.tolist() == [IQ4_VALUES[code] + 128 for code in codes]
