"""Run tiles of other instruction sets. Functions replace the instructions, so ARM's tiles run on any CPU."""

import ctypes
import re
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import numpy.typing as npt
import pytest
import torch
from llvmlite import ir

from extent import slow_except
from infer.compute import ops
from infer.compute.backends.cpu import operations, simd
from infer.compute.backends.cpu.host import host_features
from infer.compute.backends.cpu.isa import BY_NAME, Shape, instruction_set, usable_instruction_sets
from infer.compute.backends.cpu.layouts import LANES, LAYOUTS, PLANE_BYTES, SCALE_AT, WORDS, Layout
from infer.compute.backends.cpu.matmul import panels
from infer.compute.backends.cpu.matmul.vector_tiles import Operands
from infer.compute.backends.cpu.simd import I64
from infer.compute.backends.cpu.threads.pool import aligned
from infer.compute.backends.cpu.weights import packed_weight, prepare_weights
from infer.compute.backends.cpu.weights.packed_weight import PackedWeight
from infer.compute.operands.weights import Projection
from machine_code import call_native
from test_packing import make_weight

RECORDS, COLUMNS = 8, 2
ARM_TYPES = ["Q4_0", "Q8_0", "Q2_K", "Q3_K", "Q5_1", "Q6_K", "Q1_0", "IQ1_M", "IQ2_XS", "IQ3_XXS"]


def spelled_out(name: str) -> str:
    """Return the LLVM text of a function with the results of an instruction."""
    lines = list[str]()
    if "tbl1" in name:
        parameters, result = "<16 x i8> %a, <16 x i8> %b", "<16 x i8>"
        for lane in range(16):
            before = f"%r{lane - 1}" if lane else "zeroinitializer"
            lines += [
                f"%i{lane} = extractelement <16 x i8> %b, i32 {lane}",
                f"%e{lane} = extractelement <16 x i8> %a, i8 %i{lane}",
                f"%r{lane} = insertelement <16 x i8> {before}, i8 %e{lane}, i32 {lane}",
            ]
        last = "%r15"
    elif "usmmla" in name:
        parameters, result = "<4 x i32> %t, <16 x i8> %a, <16 x i8> %b", "<4 x i32>"
        lines += ["%x = zext <16 x i8> %a to <16 x i32>", "%y = sext <16 x i8> %b to <16 x i32>"]
        for lane in range(4):
            for operand, half in (("x", lane // 2), ("y", lane % 2)):
                places = ", ".join(f"i32 {8 * half + i}" for i in range(8))
                mask = f"<8 x i32> <{places}>"
                lines.append(f"%{operand}{lane} = shufflevector <16 x i32> %{operand}, <16 x i32> undef, {mask}")
            before = f"%r{lane - 1}" if lane else "zeroinitializer"
            lines += [
                f"%p{lane} = mul <8 x i32> %x{lane}, %y{lane}",
                f"%s{lane} = call i32 @llvm.vector.reduce.add.v8i32(<8 x i32> %p{lane})",
                f"%r{lane} = insertelement <4 x i32> {before}, i32 %s{lane}, i32 {lane}",
            ]
        lines.append("%sum = add <4 x i32> %t, %r3")
        last = "%sum"
    else:
        parameters, result = "<4 x i32> %t, <16 x i8> %a, <16 x i8> %b", "<4 x i32>"
        lines += ["%x = sext <16 x i8> %a to <16 x i32>", "%y = sext <16 x i8> %b to <16 x i32>"]
        lines.append("%p = mul <16 x i32> %x, %y")
        for byte in range(4):
            lanes = ", ".join(f"i32 {4 * lane + byte}" for lane in range(4))
            lines.append(f"%s{byte} = shufflevector <16 x i32> %p, <16 x i32> undef, <4 x i32> <{lanes}>")
            lines.append(f"%t{byte} = add <4 x i32> %s{byte}, {f'%t{byte - 1}' if byte else '%t'}")
        last = "%t3"
    return f"define {result} @{name}({parameters}) {{\n" + "\n".join([*lines, f"ret {result} {last}"]) + "\n}"


def tile_module(set_name: str, type_: str, form: int) -> str:
    module = ir.Module()
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [I64] * 5), "tile")
    b = ir.IRBuilder(function.append_basic_block())
    weights, activations, stride, num_records, out = function.args
    operands, shape = Operands([weights], activations, stride, num_records), Shape(1, COLUMNS, COLUMNS)
    panels.emit_tile(b, LAYOUTS[type_], form, BY_NAME[set_name], shape, operands, out, None)
    b.ret_void()
    text = f"{module}\ndeclare i32 @llvm.vector.reduce.add.v8i32(<8 x i32>)"
    for name in set(re.findall(r"llvm\.aarch64\.neon\.\w+\.[\w.]+", text)):
        text = re.sub(rf'declare [^\n]*"{re.escape(name)}"[^\n]*', spelled_out(f'"{name[5:]}"'), text)
        text = text.replace(name, name[5:])
    return text


def run(text: str, weights: npt.NDArray[np.uint8], activations: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint32]:
    out, stride = np.zeros((COLUMNS, LANES), np.uint32), activations.nbytes // RECORDS
    call_native(text, "tile", weights.ctypes.data, activations.ctypes.data, stride, RECORDS, out.ctypes.data)
    return out


def by_eight(record: npt.NDArray[np.uint8], layout: Layout) -> npt.NDArray[np.uint8]:
    """Return a record with pairs of quads stored as 8 inputs × 8 rows, as in `isa.inputs`. Trits and patterns stay."""
    starts = [(0, layout.low_bits), (layout.high_at, layout.high_bits), (layout.scale_at, 0)]
    parts = [record[layout.scale_at :]]
    for (start, width), (end, _) in reversed(list(pairwise(starts))):
        if not width:
            continue
        if start == 0 and (layout.has_trits or layout.grid):
            parts.insert(0, record[:end])
            continue
        shifts = np.arange(0, 4 if width == 4 else 8, width if width < 4 else 8, dtype=np.uint8)
        mask = np.uint8(((1 << width) - 1) if width < 4 else 255)
        quads = (record[start:end].reshape(-1, 1, 64) >> shifts[None, :, None] & mask).reshape(-1, 2, LANES, 4)
        moved = quads.transpose(0, 2, 1, 3).reshape(-1, len(shifts), 64) << shifts[None, :, None]
        parts.insert(0, np.bitwise_or.reduce(moved, axis=1).ravel())
    return np.concatenate(parts)


def paired(memory: npt.NDArray[np.uint8], layout: Layout) -> npt.NDArray[np.uint8]:
    result = aligned(len(memory), np.dtype(np.uint8))
    result[:] = memory
    for of_super in result.reshape(-1, layout.super_bytes):
        for record in of_super[layout.super_header :].reshape(-1, layout.record_bytes):
            record[:] = by_eight(record.copy(), layout)
    return result


def make_activations(form: int, random: np.random.Generator) -> npt.NDArray[np.uint8]:
    planes, has_words = form % WORDS, form > WORDS
    size = 32 * planes + 16 if not has_words else 80
    records = aligned(RECORDS * COLUMNS * size, np.dtype(np.uint8)).reshape(-1, size)
    for record in records:
        whole = random.integers(-32512, 32513, 32) if planes == 2 else random.integers(-127, 128, 32)
        high = (whole + 128) // 256 if planes == 2 else whole
        bytes_of = [high.astype(np.int8), (whole - 256 * high).astype(np.int8)][:planes]
        if has_words:  # each quad has its even inputs, then its odd ones
            bytes_of = np.split(whole.astype(np.int16).reshape(8, 2, 2).transpose(0, 2, 1).ravel().view(np.int8), 2)
        for plane, some in enumerate(bytes_of):
            record[PLANE_BYTES * plane : PLANE_BYTES * plane + 32] = some.view(np.uint8)
        record[SCALE_AT : SCALE_AT + 8] = np.array([0.01, 0.01 * whole.sum()], np.float32).view(np.uint8)
        record[-8:] = (-whole.reshape(2, 16).sum(1)).astype(np.int32).view(np.uint8)
    return records


def assert_a_tile_has_the_bits_of_the_portable_one(type_: str, planes: int, set_name: str) -> None:
    layout, isa = LAYOUTS[type_], BY_NAME[set_name]
    random = np.random.default_rng(0)
    weights = aligned(RECORDS // layout.records_per_super * layout.super_bytes, np.dtype(np.uint8))
    weights[:] = random.integers(0, 256, len(weights))
    supers = weights.reshape(-1, layout.super_bytes)
    scale_at = 0 if layout.super_header else layout.scale_at
    scales = np.full(LANES * (1 + layout.has_minimum), 0.01, np.float16).view(np.uint8)
    supers[:, scale_at : scale_at + len(scales)] = scales
    form = isa.form(layout, planes)
    own = paired(weights, layout) if isa.inputs == 8 else weights
    found = run(tile_module(set_name, type_, form), own, make_activations(form, np.random.default_rng(1)))
    expected = run(tile_module("portable", type_, planes), weights, make_activations(planes, np.random.default_rng(1)))
    assert np.isfinite(expected.view(np.float32)).all()
    assert found.tolist() == expected.tolist()


@pytest.mark.slow(cases=3, rest=6)
@pytest.mark.parametrize(
    ("type_", "planes", "set_name"),
    [(type_, planes, ("neon", "i8mm")[(at + planes) % 2]) for at, type_ in enumerate(ARM_TYPES) for planes in (1, 2)],
)
def test_a_tile_for_arm_gives_the_bits_of_the_portable_one(type_: str, planes: int, set_name: str) -> None:
    assert_a_tile_has_the_bits_of_the_portable_one(type_, planes, set_name)


@pytest.mark.parametrize(
    ("type_", "planes", "set_name", "permutes"),
    slow_except(
        [("IQ1_S", 1, "avx2", False), ("IQ2_XS", 1, "avx512vnni", True), ("IQ1_M", 2, "avx512vnni", False)],
        [
            (type_, planes, set_name, permutes)
            for type_ in ("IQ1_S", "IQ1_M", "IQ2_XS", "IQ3_XXS")
            for planes in (1, 2)
            for set_name, permutes in (("avx512vnni", True), ("avx512vnni", False), ("avx2", False))
        ],
    ),
)
def test_a_tile_for_x86_gives_the_bits_of_the_portable_one(
    type_: str, planes: int, set_name: str, permutes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if BY_NAME[set_name] not in usable_instruction_sets() or (permutes and not simd.has_byte_permutation()):
        pytest.skip(f"hardware: a CPU with {set_name}" + " and AVX-512 VBMI" * permutes)
    monkeypatch.setattr(simd, "has_byte_permutation", lambda: permutes)
    assert_a_tile_has_the_bits_of_the_portable_one(type_, planes, set_name)


@pytest.mark.slow
@pytest.mark.parametrize("type_", ["Q3_K", "Q1_0", "IQ3_XXS"])
def test_weights_lie_as_an_instruction_for_eight_inputs_takes_them(type_: str, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = make_weight(type_, 37, 512, 0, (0.5, 1.0))
    memories, rows = [], []
    for inputs in (4, 8):
        isa = replace(instruction_set(), inputs=inputs)
        for module in (prepare_weights, operations, packed_weight):
            monkeypatch.setattr(module, "instruction_set", lambda isa=isa: isa)
        part = ops.prepare(Projection((weight,)), torch.device("cpu")).parts[0]
        assert isinstance(part, PackedWeight)
        memory = (ctypes.c_uint8 * (3 * part.group_bytes)).from_address(part.data_at())
        memories.append(np.ctypeslib.as_array(memory).copy())
        rows.append(ops.embed(part, torch.tensor([0, 36, 7, 8, 16]), 1.0))
    assert memories[1].tolist() == paired(memories[0], LAYOUTS[type_]).tolist()
    assert torch.equal(*rows)


def test_the_features_of_an_arm_cpu_are_read_from_the_system(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_features.platform, "machine", lambda: "arm64")
    monkeypatch.setattr(host_features.sys, "platform", "darwin")
    monkeypatch.setattr(host_features, "sysctl", lambda name: name in ("hw.optional.arm.FEAT_DotProd",))
    assert host_features.arm_features() == {"neon", "dotprod"}
    monkeypatch.setattr(host_features.sys, "platform", "linux")
    system = SimpleNamespace(getauxval=lambda kind: {16: 1 << 1 | 1 << 20, 26: 1 << 13}[kind])
    monkeypatch.setattr(host_features.ctypes, "CDLL", lambda _: system)
    assert host_features.arm_features() == {"neon", "dotprod", "i8mm"}
