"""How weights are read from memory: by what this machine is, and with the same bits."""

from collections.abc import Callable

import llvmlite.binding as llvm
import numpy as np
import pytest
from numba import njit

from infer.backends.cpu import isa as isa_module
from infer.backends.cpu.isa import INSTRUCTION_SETS, InstructionSet, Shape, instruction_set
from infer.backends.cpu.layouts import LANES, LAYOUTS
from infer.backends.cpu.matmul.panels import TILE_BYTES, make_multiply_panel
from infer.backends.cpu.weights import weight_streams


@pytest.fixture
def prefer(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    def choose(one: bool) -> None:
        monkeypatch.setattr(isa_module, "prefers_one_stream", lambda: one)
        monkeypatch.setattr(weight_streams, "prefers_near", lambda: one)

    return choose


@pytest.mark.parametrize(
    ("name", "one", "near"),
    [("znver4", True, True), ("znver1", True, True), ("znver5", True, False), ("haswell", False, False)],
)
def test_the_core_decides(name: str, one: bool, near: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llvm, "get_host_cpu_name", lambda: name)
    assert weight_streams.prefers_one_stream.__wrapped__() is one
    assert weight_streams.prefers_near.__wrapped__() is near


def test_a_single_tokens_stream_is_prefetched_nearby_if_the_core_prefers_it(prefer: Callable[[bool], None]) -> None:
    prefer(True)
    near = weight_streams.bytes_ahead(1, 1)
    assert near < weight_streams.FAR
    assert weight_streams.bytes_ahead(2, 1) == weight_streams.bytes_ahead(1, 2) == weight_streams.FAR
    prefer(False)
    assert weight_streams.bytes_ahead(1, 1) == weight_streams.FAR


@pytest.mark.parametrize("isa", INSTRUCTION_SETS, ids=lambda isa: isa.name)
@pytest.mark.parametrize("type_", ["Q4_1", "Q8_0", "F16"])
def test_one_stream_is_a_tile_of_a_single_token(
    isa: InstructionSet, type_: str, prefer: Callable[[bool], None]
) -> None:
    layout = LAYOUTS[type_]
    for form in {isa.form(layout, planes) for planes in (1, 2)}:
        prefer(False)
        two = isa.shapes(layout, form, 2)
        prefer(True)
        assert isa.shapes(layout, form, 2) == [shape if shape.columns > 1 else Shape(1, 1, 1) for shape in two]


@pytest.mark.parametrize("type_", ["Q4_1", "Q8_0", "F16"])
@pytest.mark.parametrize("planes", [1, 2])
def test_no_bit_depends_on_it(type_: str, planes: int, prefer: Callable[[bool], None]) -> None:
    isa, layout, records, width = instruction_set(), LAYOUTS[type_], 4, 1
    form = isa.form(layout, planes)
    random = np.random.default_rng(0)
    group_bytes, size = records * layout.record_bytes, layout.activation_bytes(form)
    num_bytes = 2 * group_bytes + 2 * weight_streams.FAR
    weights = random.integers(0, 60, num_bytes, dtype=np.uint8)  # whose floats are finite
    activations = random.integers(0, 60, 16 * records * size, dtype=np.uint8)
    found = []
    for one in (False, True):
        prefer(one)
        multiply = make_multiply_panel(layout, form, isa, 2)

        @njit
        def run(first, second, inputs, out, scratch, multiply=multiply):
            multiply(first, second, inputs, width, records, out, scratch)

        out, scratch = np.zeros(2 * TILE_BYTES, np.uint8), np.zeros(1 << 16, np.uint8)
        run(weights.ctypes.data, weights.ctypes.data + group_bytes, activations.ctypes.data, out.ctypes.data,
            scratch.ctypes.data)  # fmt: skip
        results = out.view(np.float32).reshape(2, -1, LANES)[:, :width]
        assert np.isfinite(results).all()
        assert np.count_nonzero(results) > results.size // 2
        found.append(results.tobytes())
    assert found[0] == found[1]
