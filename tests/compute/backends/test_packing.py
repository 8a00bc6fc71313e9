"""Packing keeps every value to the bit, and takes the memory of the file's own blocks."""

import gc
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from block_scales import FLOATS, stored_weight, with_tails
from extent import IS_SHORT, slow_except
from infer.compute import ops
from infer.compute.backends.cpu.threads.dispatch_table import Command
from infer.compute.backends.cpu.threads.pool import set_num_threads
from infer.compute.backends.cpu.weights import prepare_weights as packing_by_rows
from infer.compute.backends.cpu.weights.packed_weight import PackedWeight, Pieces
from infer.compute.backends.cpu.workspace import matrix_bytes
from infer.compute.backends.reference_parts import dense
from infer.compute.operands.activation_values import Activations
from infer.compute.operands.mixers import Rope
from infer.compute.operands.weights import ConvertedWeight, Projection, StoredWeight, UnreadWeight
from infer.compute.quantization.ggml_types import BLOCK_TYPES
from infer.compute.quantization.quantisers import quantise
from infer.models.load import make_rope_table
from layer_caches import threads

CPU = torch.device("cpu")
TYPES = sorted(BLOCK_TYPES)
UNPACKED = ("F32", "Q8_0", "Q4_K", "Q6_K", "IQ1_M", "IQ1_S", "IQ3_XXS", "NVFP4", "F8_E4M3")
MULTIPLIED = ("F32", "Q8_0", "Q4_K", "F8_E4M3")
SOME_TYPES = UNPACKED if IS_SHORT else TYPES
EACH_TYPE = pytest.mark.parametrize("type_", slow_except(UNPACKED, TYPES))
MOST_MEMORY = 1.3  # bytes of memory per byte of the file, for the types with the fewest bits
EXTREMES = (0.0, -0.0, 6e-8, -6e-8, 5e-5, -0.37, 1.0, 65504.0, -65504.0)  # 6e-8 is the smallest f16


@pytest.fixture(autouse=True, scope="module")
def _three_threads() -> None:
    set_num_threads(3)


def make_weight(type_: str, rows: int, columns: int, seed: int, scales: tuple[float, ...]) -> StoredWeight:
    """Return random bits in every field, with scales and minimums (in float types: values) drawn from `scales`."""
    rng = np.random.default_rng(seed)

    def draw_values(shape: tuple[int, ...]) -> Any:
        return rng.standard_normal(shape) * rng.choice(scales, (rows, 1)) / 8

    return stored_weight(rng, type_, rows, columns, draw_values, lambda shape: rng.choice(np.array(scales), shape))


def columns_of(type_: str) -> list[int]:
    if type_ in FLOATS:
        return [32, 40, 64, 288]
    block = BLOCK_TYPES[type_].block_size
    return [256, 512] if block == 256 else [block, 2 * block, 256, 256 + block]


def packed(*weights: StoredWeight | UnreadWeight) -> tuple[PackedWeight, ...]:
    parts = ops.prepare(Projection(weights), CPU).parts
    assert all(isinstance(part, PackedWeight) for part in parts)
    return tuple(part for part in parts if isinstance(part, PackedWeight))


def unpacked(weight: PackedWeight) -> torch.Tensor:
    return ops.embed(weight, torch.arange(weight.out_features), 1.0)


def assert_same_values(actual: torch.Tensor, *weights: StoredWeight) -> None:
    """Check that the rows have the weights' values to the bit, except for the sign of a zero."""
    assert torch.equal(actual, torch.cat([dense(weight).float() for weight in weights]))


@EACH_TYPE
@settings(max_examples=10 if IS_SHORT else 25, deadline=None)
@given(
    rows=st.sampled_from([1, 2, 15, 16, 17, 31, 48, 75]),
    choice=st.integers(0, 3),
    scales=st.lists(st.sampled_from(EXTREMES), min_size=1, max_size=4),
    seed=st.integers(0, 2**31),
)
def test_unpacking_gives_dequantised_values(type_: str, rows: int, choice: int, scales: list[float], seed: int) -> None:
    widths = columns_of(type_)
    (only,) = packed(weight := make_weight(type_, rows, widths[choice % len(widths)], seed, tuple(scales)))
    assert only.shape == weight.shape
    assert_same_values(unpacked(only), weight)


@pytest.mark.parametrize(
    "type_", slow_except(MULTIPLIED, [type_ for type_ in TYPES if type_ not in (*FLOATS, "MXFP4", "F8_E4M3")])
)
def test_random_bytes_unpack_and_multiply_also_scales_that_are_not_finite(type_: str) -> None:
    kind, rng = BLOCK_TYPES[type_], np.random.default_rng(3)
    data = rng.integers(0, 256, (640, 256 // kind.block_size, kind.block_bytes), dtype=np.uint8)
    (only,) = packed(weight := StoredWeight(type_, (640, 256), torch.from_numpy(with_tails(data, type_, rng))))
    expected = dense(weight)
    rows = expected.isfinite().all(1)
    assert torch.equal(unpacked(only).isnan(), expected.isnan())
    assert torch.equal(unpacked(only).nan_to_num(), expected.nan_to_num())
    y = ops.project_add(torch.zeros(1, 640), Activations(torch.ones(1, 256)), Projection((only,)), None)[0]
    assert torch.equal(y.isfinite(), rows)
    assert torch.allclose(y[rows], expected[rows].sum(1), rtol=1e-3, atol=1e-3 * float(expected[rows].abs().max()))


@pytest.mark.parametrize("type_", slow_except(MULTIPLIED, TYPES))
def test_a_unit_vector_picks_a_column(type_: str) -> None:
    for columns in columns_of(type_):
        weight = make_weight(type_, 37, columns, 1, (0.01, -0.02))
        zero = torch.zeros(columns, 37)
        actual = ops.project_add(zero, Activations(torch.eye(columns)), Projection(packed(weight)), None)
        expected = dense(weight).float()
        assert torch.allclose(actual.T, expected, rtol=0, atol=2e-4 * float(expected.abs().max())), columns


@given(
    parts=st.lists(st.tuples(st.sampled_from(SOME_TYPES), st.sampled_from([1, 16, 17, 32])), min_size=1, max_size=5),
    seed=st.integers(0, 2**31),
)
@settings(max_examples=25, deadline=None)
def test_parts_of_any_types_and_sizes_keep_their_rows_in_order(parts: list[tuple[str, int]], seed: int) -> None:
    weights = [make_weight(type_, rows, 256, seed + i, (0.1, -7.0)) for i, (type_, rows) in enumerate(parts)]
    assert_same_values(torch.cat([unpacked(part) for part in packed(*weights)]), *weights)


@pytest.mark.slow
def test_every_exponent_of_a_power_of_two_is_kept() -> None:
    weight = make_weight("MXFP4", 256, 32, 0, ())
    weight.data[:, 0] = torch.arange(256, dtype=torch.uint8)
    assert_same_values(unpacked(*packed(weight)), weight)


def test_rows_that_are_strided_in_memory_are_packed_as_they_are() -> None:
    whole = make_weight("Q8_0", 64, 64, 5, (0.5,))
    every_second = StoredWeight("Q8_0", (32, 64), whole.data[::2])
    (only,) = packed(every_second)
    assert_same_values(unpacked(only), every_second)


@EACH_TYPE
def test_packed_weights_take_the_bytes_of_the_stored_ones(type_: str) -> None:
    (only,) = packed(weight := make_weight(type_, 64, 512, 0, (1.0,)))
    ratio = MOST_MEMORY if type_.startswith(("IQ", "TQ")) else 1.2  # scales of 4 or 6 bits are stored as bytes
    assert weight.num_bytes <= only.num_bytes <= ratio * weight.num_bytes
    assert only.num_bytes == matrix_bytes(type_, *weight.shape)


@EACH_TYPE
def test_large_weights_are_read_a_few_rows_at_a_time(type_: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("infer.compute.backends.cpu.weights.prepare_weights._BYTES_AT_ONCE", 20_000)
    weights = tuple(make_weight(type_, rows, 512, rows, (0.5, -3.0)) for rows in (64, 16, 160, 75))
    read: list[int] = []

    def unread(weight: StoredWeight) -> UnreadWeight:
        def rows(first: int, last: int) -> torch.Tensor:
            read.append((last - first) * weight.row_bytes)
            return weight.data[first:last].clone()

        return UnreadWeight(weight.type, weight.shape, rows)

    parts = packed(*map(unread, weights))
    assert_same_values(torch.cat([unpacked(part) for part in parts]), *weights)
    assert sum(read) == sum(weight.num_bytes for weight in weights)
    assert max(read) < 2 * max(20_000, 16 * weights[0].row_bytes)


@pytest.mark.parametrize("modules", ["cpu", "reference"])
@pytest.mark.parametrize("type_", slow_except(["Q8_0"], ["Q8_0", "Q4_1", "BF16"]))
def test_conversion_by_rows_is_that_of_the_whole(type_: str, modules: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("infer.compute.backends.cpu.weights.prepare_weights._BYTES_AT_ONCE", 100_000)

    def convert(rows: StoredWeight) -> torch.Tensor:
        return rows.data.bfloat16() if type_ == "BF16" else quantise(rows.data, type_)

    source, asked = make_weight("F32", 107, 96, 0, (0.1, 2.0)), []
    whole = StoredWeight(type_, source.shape, convert(source))

    def noted(rows: StoredWeight) -> torch.Tensor:
        asked.append(rows.out_features)
        return convert(rows)

    with ops.using(modules):
        converted = ConvertedWeight(source, type_, noted)
        assert converted.num_bytes == whole.num_bytes
        (only,) = ops.prepare(Projection((converted,)), CPU).parts
        assert_same_values(ops.embed(only, torch.arange(107), 1.0), whole)
    assert asked == ([16] * 6 + [11] if modules == "cpu" else [107])  # three threads, with one group each at a time


@pytest.mark.parametrize("num_threads", [1, 2, 3, 7])
@pytest.mark.parametrize("rows", [(640,), (320, 48, 160), (320, 320)], ids=["one", "qkv", "gate and up"])
def test_a_thread_packs_the_rows_that_will_be_its_share(
    rows: tuple[int, ...], num_threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rows of gate and up are paired, so a thread has a share of each."""
    weights = [make_weight("Q4_K", count, 256, count, (0.5,)) for count in rows]
    packed_by, command = dict[int, int](), packing_by_rows._command

    def noted(part: StoredWeight, into: PackedWeight, group: int, thread: int) -> Command:
        packed_by.update({group + index: thread for index in range(part.out_features // 16)})
        return command(part, into, group, thread)

    monkeypatch.setattr(packing_by_rows, "_BYTES_AT_ONCE", 20_000)
    monkeypatch.setattr(packing_by_rows, "_command", noted)
    with threads(num_threads):
        (only,) = packed(*weights)
    sizes = [count // 16 for count in rows] if len(rows) == 2 else [sum(rows) // 16]
    shares = list[int]()
    for size in sizes:
        starts = [size * thread // num_threads for thread in range(num_threads + 1)]
        shares += np.repeat(range(num_threads), np.diff(starts)).tolist()
    assert [packed_by[group] for group in range(len(shares))] == shares
    assert_same_values(unpacked(only), *weights)


def test_small_weights_lie_side_by_side_from_a_huge_page_on() -> None:
    pieces = Pieces()
    weights = [pieces.take(size) for size in (*[300_001] * 5, 100_000_000)]
    starts = [weight.data_ptr() for weight in weights]
    assert (starts[0] % 2**21, starts[-1] % 2**21) == (0, 0)
    assert np.diff(starts[:5]).tolist() == [300_032] * 4  # whole cache lines
    assert not any(weight.count_nonzero() for weight in weights)


def test_memory_goes_when_the_last_weight_in_it_does() -> None:
    pieces = Pieces()
    first, second = pieces.take(1000), pieces.take(1000)
    del first
    gc.collect()
    assert pieces._newest() is not None
    del second
    gc.collect()
    assert pieces._newest() is None
    assert pieces.take(10).data_ptr() % 2**21 == 0


def test_rows_beyond_the_last_are_padding_of_zeros() -> None:
    (only,) = packed(make_weight("F32", 17, 32, 0, (1.0,)))
    assert only.num_groups == 2
    second = only.data[only.group_bytes :].view(torch.float32).reshape(32, 16)
    assert second[:, 1:].count_nonzero() == 0


def test_a_rope_table_holds_the_cosine_and_sine_of_each_angle() -> None:
    table = make_rope_table(Rope(dim=8, theta=100.0), 50, CPU)
    angles = np.arange(50)[:, None] * 100.0 ** (-np.arange(0, 8, 2) / 8)
    assert np.allclose(table.cos[0], np.cos(angles), atol=1e-5)
    assert np.allclose(table.sin[0], np.sin(angles), atol=1e-5)
