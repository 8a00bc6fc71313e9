"""The way to read weights from memory depends on the machine, and the bits do not."""

from collections.abc import Callable

import llvmlite.binding as llvm
import numpy as np
import pytest
from llvmlite.ir import IRBuilder as Builder
from numba import njit, types

from infer.compute.backends.cpu import isa as isa_module
from infer.compute.backends.cpu import weight_streams
from infer.compute.backends.cpu.isa import INSTRUCTION_SETS, InstructionSet, instruction_set
from infer.compute.backends.cpu.layouts import LANES, LAYOUTS, PANEL, activation_bytes
from infer.compute.backends.cpu.matmul.matrix_tiles import make_configure, release
from infer.compute.backends.cpu.matmul.panels import TILE_BYTES, make_multiply_panel
from infer.compute.backends.cpu.prefetch import Ahead
from infer.compute.backends.cpu.simd import Value, address, operation
from infer.compute.backends.cpu.threads.pool import aligned

Prefer = Callable[[int], None]


@pytest.fixture
def prefer(monkeypatch: pytest.MonkeyPatch) -> Prefer:
    """Return a function that lets tiles of up to `most` tokens read one stream. Zen 4 does so for one token."""

    def choose(most: int) -> None:
        monkeypatch.setattr(isa_module, "most_by_one_stream", lambda is_float: min(most, 1) if is_float else most)
        monkeypatch.setattr(weight_streams, "prefers_near", lambda: most == 1)

    return choose


@pytest.mark.parametrize(
    ("name", "most", "most_of_floats", "near"),
    [("znver4", 1, 1, True), ("znver1", 1, 1, True), ("znver5", 4, 1, False), ("haswell", 0, 0, False)],
)
def test_the_core_decides(
    name: str, most: int, most_of_floats: int, near: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(llvm, "get_host_cpu_name", lambda: name)
    monkeypatch.setattr(weight_streams, "prefers_near", weight_streams.prefers_near.__wrapped__)
    assert weight_streams.most_by_one_stream.__wrapped__(is_float=False) == most
    assert weight_streams.most_by_one_stream.__wrapped__(is_float=True) == most_of_floats
    assert weight_streams.prefers_near() is near


def test_a_single_tokens_stream_is_prefetched_nearby_if_the_core_prefers_it(prefer: Prefer) -> None:
    prefer(1)
    near = weight_streams.bytes_ahead(1, 1)
    assert near < weight_streams.FAR
    assert weight_streams.bytes_ahead(2, 1) == weight_streams.bytes_ahead(1, 2) == weight_streams.FAR
    prefer(4)
    assert weight_streams.bytes_ahead(1, 1) == weight_streams.FAR


@pytest.mark.slow(cases=1)
@pytest.mark.parametrize("group_bytes", [64, 5760, 15360, 16384, 16448, 40960])
def test_a_stream_prefetches_its_own_later_groups(group_bytes: int) -> None:
    """Two streams read groups 0 and 1, then 2 and 3: the first one reads the even groups."""
    far = weight_streams.FAR

    @operation(types.int64, address, address, address)
    def distance(b: Builder, first: Value, second: Value, record: Value) -> Value:
        return Ahead(b, [first, second], far).of(record)

    @operation(types.int64, address, address)
    def distance_of_one(b: Builder, first: Value, record: Value) -> Value:
        return Ahead(b, [first], far).of(record)

    @njit
    def distances(first, group_bytes, at):  # type: ignore[no-untyped-def]
        return distance(first, first + group_bytes, first + at), distance_of_one(first, first + at)

    base = 1 << 40
    for at in range(0, group_bytes, 64):
        of_two, of_one = distances(base, group_bytes, at)
        group, within = divmod(at + of_two, group_bytes)
        assert (group % 2, group // 2 * group_bytes + within, of_one) == (0, at + far, far)


@pytest.mark.parametrize("isa", INSTRUCTION_SETS, ids=lambda isa: isa.name)
@pytest.mark.parametrize("type_", ["Q4_1", "Q8_0", "F16"])
def test_tiles_of_few_tokens_read_one_stream(isa: InstructionSet, type_: str, prefer: Prefer) -> None:
    layout = LAYOUTS[type_]
    for form in {isa.form(layout, planes) for planes in (1, 2)}:
        prefer(0)
        two = isa.shapes(layout, form, 2)
        widest = max(shape.columns for shape in two if not shape.on_matrices)
        for most in (1, 4):
            prefer(most)
            shapes, limit = isa.shapes(layout, form, 2), 1 if layout.is_float else most
            few = [shape for shape in shapes if shape.columns <= limit and shape.columns < widest]
            assert all(shape.groups == 1 for shape in few)
            assert [shape.columns for shape in shapes if shape.widest == PANEL] == [shape.columns for shape in two]


@pytest.mark.slow
@pytest.mark.parametrize(("type_", "planes"), [("Q4_1", 2), ("Q8_0", 1), ("F16", 2)])
def test_no_bit_depends_on_it(type_: str, planes: int, prefer: Prefer) -> None:
    isa, layout, records, widths = instruction_set(), LAYOUTS[type_], 4, (1, 2, 4, 7, 8, 11, 16)
    form, on_matrices, configure = isa.form(layout, planes), isa.may_use_matrices(layout), make_configure(layout)
    random = np.random.default_rng(0)
    group_bytes, size = records * layout.record_bytes, activation_bytes(form)
    num_bytes = 2 * group_bytes + 2 * weight_streams.FAR
    weights = random.integers(0, 60, num_bytes, dtype=np.uint8)  # bytes whose floats are finite
    activations = random.integers(0, 60, 16 * records * size, dtype=np.uint8)
    found = []
    for most in (0, 1, 4):
        prefer(most)
        multiply = make_multiply_panel(layout, form, isa, 2)

        @njit
        def run(first, second, inputs, width, out, scratch, multiply=multiply):
            if on_matrices:  # a constant
                configure(width > 0, scratch)
            multiply(first, second, inputs, width, records, out, scratch)
            if on_matrices:
                release(width > 0)

        all_results = []
        for width in widths:
            out, scratch = np.zeros(2 * TILE_BYTES, np.uint8), aligned(1 << 16, np.dtype(np.uint8))
            run(weights.ctypes.data, weights.ctypes.data + group_bytes, activations.ctypes.data, width,
                out.ctypes.data, scratch.ctypes.data)  # fmt: skip
            results = out.view(np.float32).reshape(2, -1, LANES)[:, :width]
            assert np.isfinite(results).all()
            assert np.count_nonzero(results) > results.size // 2
            all_results.append(results.tobytes())
        found.append(all_results)
    assert found[0] == found[1] == found[2]
