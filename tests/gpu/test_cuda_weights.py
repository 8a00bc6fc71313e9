"""Claims about the kernels that read weights on a GPU, in Triton's interpreter: what `reference` means, in one order
of sums for any number of tokens."""

import ctypes
import mmap
from dataclasses import replace
from typing import get_args

import pytest
import torch
from torch import Tensor

from extent import IS_WHOLE
from infer.compute.backends import reference
from infer.compute.operands.activation_values import Activations
from infer.compute.operands.feed_forwards import Activation
from infer.compute.operands.weights import Norm, PerLayerWeights, Projection, StoredWeight, UnreadWeight
from infer.compute.quantization.ggml_types import BLOCK_TYPES
from test_packing import make_weight

pytest.importorskip("triton", reason="Triton is not installed")

from gpu_twins import assert_left_in_planes
from infer.compute.backends import cuda
from infer.compute.backends.cuda import layouts, projection
from infer.compute.backends.cuda.activations import Twin, quantized, twin_of
from infer.compute.backends.cuda.dense import TILES, dense_tile
from infer.compute.backends.cuda.layouts import LAYOUTS, PLANES
from infer.compute.backends.cuda.projection import FORMS, multiply
from quick_interpreter import multiply_in_one_order

CPU = torch.device("cpu")
TYPES = sorted(LAYOUTS)
QUANTIZED = [name for name in TYPES if not LAYOUTS[name].is_float]
FAST = QUANTIZED if IS_WHOLE else ("Q8_0", "Q6_K", "IQ4_NL")
PLANE_NAMES = ("codes", "high", "scales", "minima", "supers")
ONE_EACH = {*{replace(own, type="", table=own.table and (0,)): name for name, own in LAYOUTS.items()}.values(), "F16"}
PRODUCTS = [(type_, "exact") for type_ in TYPES if IS_WHOLE or type_ in ONE_EACH] + [(type_, "fast") for type_ in FAST]
SCALES = (0.5, -0.37, 1.0, 0.01)
pytestmark = pytest.mark.usefixtures("quick_interpreter")


def weight_of(type_: str, rows: int, columns: int, seed: int = 0) -> StoredWeight:
    return make_weight(type_, rows, columns, seed, SCALES)


def columns_of(type_: str) -> int:
    """Some blocks, not a power of two, or a tail."""
    return {1: 45, 32: 96, 64: 320, 128: 384, 256: 512}[BLOCK_TYPES[type_].block_size]


def activations(tokens: int, columns: int) -> Tensor:
    x = torch.randn(tokens, columns, generator=torch.Generator().manual_seed(tokens))
    x[:, ::7] *= 30
    return x


def norm_of(columns: int) -> Norm:
    return Norm(torch.randn(columns, generator=torch.Generator().manual_seed(9)), 1e-5)


def quantized_values(x: Tensor, precision: str = "exact") -> Tensor:
    """x as the integers of its blocks mean it."""
    unit = 32512.0 if precision == "exact" else 127.0
    blocks = x.view(len(x), -1, 32)
    largest = blocks.abs().amax(2, keepdim=True).clamp(min=1e-33)
    return ((blocks * (unit / largest)).round() * (largest / unit)).flatten(1)


def assert_near(got: Tensor, expected: Tensor, tolerance: float = 1e-5) -> None:
    assert (got.shape, got.dtype) == (expected.shape, torch.float32)
    assert float((got - expected).abs().amax() / expected.abs().amax().clamp(min=1e-30)) < tolerance


@pytest.mark.parametrize("type_", TYPES)
def test_embedded_rows_have_the_bits_of_the_file(type_: str) -> None:
    weight = weight_of(type_, 7, columns_of(type_))
    table = cuda.prepare(Projection((weight,)), CPU).parts[0]
    token_ids = torch.tensor([6, 0, 3, 3])
    values = reference.dense(weight)[token_ids].float()
    assert torch.equal(cuda.embed(table, token_ids, 1.0), values)
    assert torch.equal(cuda.embed(table, token_ids, 3.7), values * 3.7)
    assert cuda.embed(table, token_ids[:0], 1.0).shape == (0, weight.in_features)


def products(type_: str, columns: int, precision: str) -> tuple[Tensor, Tensor, Projection]:
    """Return activations, products and matrix of 10 tokens by `matmul` or `dense`."""
    stored = Projection((weight_of(type_, 21, columns),), torch.randn(21))
    prepared, x = cuda.prepare(stored, CPU, precision), activations(10, columns)
    y = cuda.norm_project(x, None, prepared).floats
    seen = x if LAYOUTS[type_].is_float else quantized_values(x, precision)
    assert_near(y, reference.norm_project(seen, None, stored).floats)
    return x, y, prepared


@pytest.mark.slow(cases=2)
@pytest.mark.parametrize(("type_", "precision"), PRODUCTS)
def test_products_are_those_of_the_definition_in_one_order_for_any_tokens(type_: str, precision: str) -> None:
    columns = min(columns_of(type_), 256) if BLOCK_TYPES[type_].block_size == 256 else columns_of(type_)
    x, y, prepared = products(type_, columns, precision)
    for first, last in ((0, 1), (3, 5), (1, 10)):
        assert torch.equal(cuda.norm_project(x[first:last], None, prepared).floats, y[first:last])


@pytest.mark.slow(rest=2)
@pytest.mark.parametrize(
    ("type_", "columns", "is_gated"), [("BF16", 320, True), ("BF16", 45, False), ("F16", 320, False), ("F16", 45, True)]
)
def test_every_tile_of_floats_gives_a_token_the_same_bits(
    type_: str, columns: int, is_gated: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored = Projection((weight_of(type_, 96, columns, 1), weight_of(type_, 96, columns, 2)))
    prepared, x, norm, found = cuda.prepare(stored, CPU), activations(64, columns), norm_of(columns), []
    for tile in TILES[FORMS[type_]]:
        monkeypatch.setattr(projection, "dense_tile", lambda *_, tile=tile: tile)
        for count in (1, 8, 9, 16, 17, 64):
            part = x[:count]
            y = cuda.norm_gate(part, norm, prepared, "silu") if is_gated else cuda.norm_project(part, norm, prepared)
            found.append(y.floats)
            if is_gated:
                assert_left_in_planes(y, FORMS[type_])
    assert len(found) >= 12
    assert all(torch.equal(y, found[-1][: len(y)]) for y in found)


def test_few_rows_have_one_order_for_any_tokens_which_no_divided_matrix_has() -> None:
    stored = Projection((weight_of("F32", 40, 700),), torch.randn(40))
    prepared, x, found = cuda.prepare(stored, CPU), activations(20, 700), []
    for count in (1, 8, 9, 20):
        found.append(torch.empty(count, 40))
        multiply(Activations(x[:count]), None, prepared, found[-1], has_few_rows=True)
    assert_near(found[-1], reference.norm_project(x, None, stored).floats)
    assert all(torch.equal(y, found[-1][: len(y)]) for y in found)
    whole = cuda.norm_project(
        x, None, cuda.prepare(replace(stored, parts=(weight_of("F32", 600, 700),), bias=None), CPU)
    )
    own = replace(stored, parts=(weight_of("F32", 600, 700).rows(0, 40),), bias=None)
    part = cuda.norm_project(x, None, cuda.prepare(own, CPU))
    assert torch.equal(part.floats, whole.floats[:, :40]), "a rank's rows have the bits of all rows"


@pytest.mark.parametrize("type_", ["BF16", "F16"])
def test_planes_have_the_bits_of_activations(type_: str) -> None:
    """BF16 has all 24. F16 has 22 of the numbers that are not tiny beside the block's largest."""
    x = activations(5, 96) * torch.tensor([[1.0], [1e-30], [0.0], [1e30], [1e-6]])
    codes, scales, _ = quantized(x, None, FORMS[type_])
    values = codes.double().sum(1).flatten(1)
    if type_ == "F16":
        values *= scales.double().repeat_interleave(32, dim=1)
    largest = x.double().view(5, 3, 32).abs().amax(2).repeat_interleave(32, dim=1)
    bits, absolute = (24, 1e-40) if type_ == "BF16" else (22, largest * 2.0**-38)
    assert bool(((values - x.double()).abs() <= x.double().abs() * 2.0**-bits + absolute).all())


@pytest.mark.parametrize(
    ("num_tokens", "num_rows", "place"),
    [(1, 128_256, -1), (16, 8192, -1), (64, 2048, -1), (64, 8192, 1), (512, 2048, 0)],
)
def test_a_tile_is_as_large_as_leaves_enough_programs(num_tokens: int, num_rows: int, place: int) -> None:
    assert dense_tile(num_tokens, num_rows, FORMS["BF16"]) == TILES[FORMS["BF16"]][place]


@pytest.mark.parametrize("type_", ["BF16", "F16"])
def test_products_of_floats_are_no_further_from_float64_than_those_of_two_tf32_numbers(type_: str) -> None:
    weight, x = weight_of(type_, 64, 1024), activations(8, 1024)
    exact = x.double() @ reference.dense(weight).double().T
    high = (x.view(torch.int32) & -(1 << 13)).view(torch.float32)
    low = ((x - high).view(torch.int32) & -(1 << 13)).view(torch.float32)
    as_tf32 = (high.double() + low.double()) @ reference.dense(weight).double().T
    found = cuda.norm_project(x, None, cuda.prepare(Projection((weight,)), CPU)).floats.double()
    rounded = float(exact.abs().amax()) * 2.0**-24
    assert float((found - exact).abs().mean()) <= float((as_tf32 - exact).abs().mean()) + rounded


@pytest.mark.slow(rest=0)
@pytest.mark.parametrize("type_", QUANTIZED if IS_WHOLE else ["Q6_K"])
def test_every_number_of_tokens_has_the_bits_of_one(type_: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """18 quads in 8 lanes: two lanes take three, the others two."""
    prepared, x = cuda.prepare(Projection((weight_of(type_, 5, 2304),)), CPU), activations(64, 2304)
    by_few = cuda.norm_project(x[:8], None, prepared).floats
    for count in (1, 8, 9, 16, 17, 64):
        found = cuda.norm_project(x[:count], None, prepared).floats
        assert torch.equal(found[:8], by_few[:count])
    monkeypatch.setattr(projection, "FEW_TOKENS", 0)
    for count in (1, 8, 17):
        assert torch.equal(cuda.norm_project(x[:count], None, prepared).floats, found[:count])


def test_no_product_is_left_to_a_library_that_rounds_by_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    """OpenBLAS does on every CPU with AVX2 alone, so that the claims about bits would fail there."""
    monkeypatch.setattr("numpy.matmul", None)
    stored, x = Projection((weight_of("F32", 21, 64),)), activations(7, 64)
    found = cuda.norm_project(x, None, cuda.prepare(stored, CPU)).floats
    assert_near(found, reference.norm_project(x, None, stored).floats)


@pytest.mark.parametrize("terms", [16, 128])
def test_products_of_the_harness_have_one_order_for_any_number_of_rows_and_columns(terms: int) -> None:
    x, y = activations(9, terms).numpy(), activations(terms, 33).numpy()
    whole = multiply_in_one_order(x, y, x.dtype)
    assert_near(torch.from_numpy(whole), torch.from_numpy(x.astype("f8") @ y).float())
    for first, last in ((0, 1), (3, 5), (1, 9)):
        assert (multiply_in_one_order(x[first:last], y, x.dtype) == whole[first:last]).all()
        assert (multiply_in_one_order(x, y[:, first:last], x.dtype) == whole[:, first:last]).all()


@pytest.mark.slow(cases=1)
@pytest.mark.parametrize("blocks", [1, 31, 33, 70])
def test_lanes_take_several_blocks_or_none_in_one_order(blocks: int) -> None:
    x, y, prepared = products("Q4_1", 32 * blocks, "fast")
    assert torch.equal(cuda.norm_project(x[3:5], None, prepared).floats, y[3:5])


def test_quantised_activations_are_integers_by_the_rule_of_the_cpu() -> None:
    x = activations(3, 96) * torch.tensor([[1.0], [1e-36], [0.0]])
    for planes, unit in ((2, 32512), (1, 127)):
        codes, scales, sums = quantized(x, None, planes)
        bytes_ = codes.view(torch.int8).view(3, planes, 96).int()
        integers = bytes_[:, 0] * 256 + bytes_[:, 1] if planes == 2 else bytes_[:, 0]
        largest = x.view(3, 3, 32).abs().amax(2).clamp(min=1e-33)
        assert torch.equal(scales, largest / unit)
        inverse = (torch.tensor(float(unit)) / largest)[:, :, None]
        assert torch.equal(integers, (x.view(3, 3, 32) * inverse).round().int().view(3, 96))
        assert torch.equal(sums, integers.view(3, 3, 2, 16).sum(3, dtype=torch.int32))


def test_a_fault_in_one_token_is_not_hidden_and_stays_there() -> None:
    prepared, x = cuda.prepare(Projection((weight_of("Q4_0", 5, 64),)), CPU), activations(3, 64)
    alone = cuda.norm_project(x, None, prepared).floats
    x[1, 40] = torch.nan
    y = cuda.norm_project(x, None, prepared).floats
    assert y[1].isnan().all()
    assert torch.equal(y[::2], alone[::2])


@pytest.mark.parametrize(("tokens", "precision"), [(2, "exact"), (9, "exact"), (2, "fast")])
def test_a_gate_leaves_what_the_next_product_takes(tokens: int, precision: str) -> None:
    stored = Projection((weight_of("Q4_0", 96, 64, 1), weight_of("Q4_0", 96, 64, 2)))
    hidden = cuda.norm_gate(activations(tokens, 64), None, cuda.prepare(stored, CPU, precision), "silu")
    assert_left_in_planes(hidden, PLANES[precision])


def test_a_product_reads_the_twin_and_quantises_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    down, x = cuda.prepare(Projection((weight_of("Q4_0", 38, 64),)), CPU), activations(3, 64)
    plain = cuda.project_add(torch.zeros(3, 38), Activations(x), down, None)
    twin = Twin(PLANES["exact"], quantized(x, None, PLANES["exact"]))
    monkeypatch.setattr(projection, "quantized", None)
    assert torch.equal(cuda.project_add(torch.zeros(3, 38), Activations(x, twin), down, None), plain)
    with pytest.raises(TypeError):
        cuda.project_add(torch.zeros(3, 38), Activations(x), down, None)


@pytest.mark.slow(cases=1)
@pytest.mark.parametrize("tokens", [2, 11])
@pytest.mark.parametrize("type_", ["Q4_K", "BF16"])
def test_every_epilogue_is_that_of_the_definition(type_: str, tokens: int) -> None:
    x, norm = activations(tokens, 256), norm_of(256)
    stored = Projection((weight_of(type_, 19, 256, 1), weight_of(type_, 19, 256, 2)), torch.randn(2 * 19))
    prepared = cuda.prepare(stored, CPU)
    assert len(prepared.parts) == 1
    y = cuda.norm_project(x, norm, prepared).floats
    assert_near(y, reference.norm_project(x, norm, stored).floats, 1e-4)  # activations are integers of 16 bits
    for activation in get_args(Activation):
        if activation != "xielu":
            expected = reference.gated(y[:, :19], y[:, 19:], activation)
            assert_near(cuda.norm_gate(x, norm, prepared, activation).floats, expected)
        if activation != "clamped_swiglu":
            curve = torch.tensor([0.8, 1.1, 0.5, -1e-6]) if activation == "xielu" else None
            alone = cuda.norm_activate(x, norm, replace(prepared, curve=curve), activation)
            assert_near(alone.floats, reference.activated(y, activation, curve))
    residual, plain = torch.randn(tokens, 38), cuda.norm_project(x, None, prepared).floats
    assert torch.equal(cuda.project_add(residual.clone(), Activations(x), prepared, None), residual + plain)
    post_norm = norm_of(38)
    expected = residual + reference.normalize(plain, post_norm)
    assert_near(cuda.project_add(residual.clone(), Activations(x), prepared, post_norm), expected)
    indices = torch.tensor([1, 0])
    assert torch.equal(cuda.head(x, indices, norm, prepared), cuda.norm_project(x[indices], norm, prepared).floats)
    cap = float(y.abs().max()) / 2
    assert_near(cuda.head(x, indices, norm, prepared, cap), reference.softcapped(y[indices], cap))
    assert_near(cuda.normalize(x, norm), reference.normalize(x, norm), 1e-6)


@pytest.mark.parametrize("has_bias", [False, True])
def test_norms_that_subtract_the_mean_are_the_references_in_every_op(has_bias: bool) -> None:
    """Their rows are off their mean, and 1,100 columns are more than a program reads at a time."""
    x, bias = activations(3, 1100) + 40, torch.randn(1100, generator=torch.manual_seed(1)) if has_bias else None
    norm = replace(norm_of(1100), bias=bias, is_centred=True)
    assert_near(cuda.normalize(x, norm), reference.normalize(x, norm))
    for type_ in ("Q8_0", "F32"):
        stored = Projection((weight_of(type_, 33, 1100 if type_ == "F32" else 1088),))
        own = replace(
            norm, weight=norm.weight[: stored.in_features], bias=bias if bias is None else bias[: stored.in_features]
        )
        given = x[:, : stored.in_features].contiguous()
        y = cuda.norm_activate(given, own, cuda.prepare(stored, CPU), "gelu")
        assert_near(y.floats, reference.norm_activate(given, own, stored, "gelu").floats, 1e-4)
    residual = torch.randn(3, 1100)
    prepared, stored = (
        each(Projection((weight_of("F32", 1100, 40),)), CPU) for each in (cuda.prepare, reference.prepare)
    )
    expected = reference.project_add(residual, Activations(x[:, :40]), stored, norm)
    assert_near(cuda.project_add(residual.clone(), Activations(x[:, :40]), prepared, norm), expected)


@pytest.mark.parametrize("type_", ["Q8_0", "BF16"])
def test_a_product_without_a_gate_leaves_what_the_next_product_takes(type_: str) -> None:
    for tokens in (2, 11):
        prepared, form = (
            cuda.prepare(Projection((weight_of(type_, 64, 96),), torch.randn(64)), CPU),
            FORMS.get(type_, 2),
        )
        assert_left_in_planes(cuda.norm_activate(activations(tokens, 96), norm_of(96), prepared, "relu_squared"), form)


def test_parts_of_several_types_keep_them() -> None:
    parts = tuple(weight_of(type_, rows, 256) for type_, rows in (("Q4_K", 6), ("Q4_K", 4), ("Q6_K", 3), ("F16", 5)))
    stored = Projection(parts, torch.randn(18))
    prepared = cuda.prepare(stored, CPU)
    assert [(part.layout.type, part.out_features) for part in prepared.parts] == [("Q4_K", 10), ("Q6_K", 3), ("F16", 5)]
    x, norm = activations(3, 256), norm_of(256)
    assert_near(cuda.norm_project(x, norm, prepared).floats, reference.norm_project(x, norm, stored).floats, 1e-4)
    mixed = Projection((weight_of("Q4_K", 6, 256), weight_of("Q8_0", 6, 256)))
    gated = cuda.norm_gate(x, norm, cuda.prepare(mixed, CPU), "silu").floats
    assert_near(gated, reference.norm_gate(x, norm, mixed, "silu").floats, 1e-4)


def guarded(values: Tensor) -> Tensor:
    """Return a copy that ends where a page begins that may not be touched."""
    num_bytes = values.numel() * values.element_size()
    pages = -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
    memory = mmap.mmap(-1, pages + mmap.PAGESIZE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(address + pages), mmap.PAGESIZE, 0) == 0
    copy = torch.frombuffer(memory, dtype=values.dtype, count=values.numel(), offset=pages - num_bytes)
    return copy.view(values.shape).copy_(values)


@pytest.mark.slow(cases=1)
@pytest.mark.parametrize("type_", ["Q4_0", "Q8_0", "Q3_K", "Q5_K", "BF16"])
def test_nothing_beyond_a_tensor_is_touched(type_: str) -> None:
    """To touch it ends the process."""
    columns = columns_of(type_)
    part = cuda.prepare(Projection((weight_of(type_, 3, columns),)), CPU).parts[0]
    planes = {name: getattr(part, name) for name in PLANE_NAMES}
    part = replace(part, **{name: guarded(plane) for name, plane in planes.items() if plane is not None})
    norm = Norm(guarded(torch.ones(columns)), 1e-5)
    for tokens in (1, 9):
        x, y = guarded(activations(tokens, columns)), guarded(torch.zeros(tokens, 3))
        multiply(Activations(x), norm, Projection((part,), guarded(torch.zeros(3))), y, add=True)
        assert y.isfinite().all()
    cuda.embed(part, guarded(torch.tensor([2, 0])), 1.0)


def test_no_tokens_have_no_products() -> None:
    prepared = cuda.prepare(Projection((weight_of("Q8_0", 6, 64),)), CPU)
    x, none = torch.zeros(0, 64), torch.zeros(0, dtype=torch.int64)
    assert cuda.norm_project(x, norm_of(64), prepared).floats.shape == (0, 6)
    assert cuda.project_add(torch.zeros(0, 6), Activations(x), prepared, norm_of(6)).shape == (0, 6)
    assert cuda.head(torch.zeros(4, 64), none, norm_of(64), prepared).shape == (0, 6)


@pytest.mark.parametrize("type_", ["Q5_1", "Q3_K", "F32"])
def test_rows_that_are_read_some_at_a_time_are_the_same(type_: str, monkeypatch: pytest.MonkeyPatch) -> None:
    columns = columns_of(type_)
    weight = weight_of(type_, 7, columns)
    whole = cuda.prepare(Projection((weight, weight)), CPU).parts[0]
    monkeypatch.setattr(layouts, "_BYTES_AT_ONCE", 3 * weight.row_bytes)
    unread = UnreadWeight(type_, weight.shape, lambda first, last: weight.data[first:last])
    pieces = cuda.prepare(Projection((unread, weight)), CPU).parts[0]
    for name in PLANE_NAMES:
        one, other = getattr(whole, name), getattr(pieces, name)
        assert (one is None and other is None) or torch.equal(one.view(torch.uint8), other.view(torch.uint8))


@pytest.mark.slow
@pytest.mark.parametrize("type_", ["Q4_0", "BF16"])
@pytest.mark.parametrize("num_tokens", [3, 40])
def test_what_is_no_token_is_no_number_and_others_do_not_notice(type_: str, num_tokens: int) -> None:
    """A tile of nothing else reads no weight: at the end there are none to read."""
    stored = Projection((weight_of(type_, 12, 96, 1), weight_of(type_, 12, 96, 2)), torch.randn(24))
    prepared, x = cuda.prepare(stored, CPU), activations(num_tokens, 96)
    gated = cuda.norm_gate(x, norm_of(96), prepared, "silu").floats
    x[1:] = cuda.embed(cuda.prepare(Projection((weight_of(type_, 5, 96),)), CPU).parts[0], torch.full((1,), -1), 1.0)
    found = cuda.norm_gate(x, norm_of(96), prepared, "silu").floats
    assert torch.equal(found[0], gated[0])
    assert found[1:].isnan().all()
    logits = cuda.head(x, torch.tensor([0, -1, -1]), norm_of(96), prepared)
    assert torch.equal(logits[0], cuda.norm_project(x[:1], norm_of(96), prepared).floats[0])
    assert logits[1:].isnan().all()
    none = torch.empty(40, 24)
    head = replace(prepared, parts=tuple(replace(part, codes=part.codes[:0]) for part in prepared.parts))
    multiply(Activations(x), norm_of(96), head, none, indices=torch.full((40,), -1))
    assert none.isnan().all()


VOCAB, LAYERS, DIM, HIDDEN = 20, 4, 64, 96
TOKENS = torch.tensor([3, 0, 19, 3, 17, 5, 6, 7, 8, 9])


def per_layer_weights(type_: str) -> tuple[PerLayerWeights, PerLayerWeights]:
    """Return the reference's and CUDA's."""
    whole = weight_of(type_, VOCAB, LAYERS * DIM)
    table = UnreadWeight(whole.type, whole.shape, lambda low, high: whole.data[low:high])
    projection = Projection((weight_of("F32", LAYERS * DIM, HIDDEN),))
    stored = PerLayerWeights(table, 0.7, projection, norm_of(DIM))
    (packed,) = cuda.prepare(Projection((table,)), CPU).parts
    return stored, replace(stored, table=packed, projection=cuda.prepare(projection, CPU))


@pytest.mark.parametrize("type_", ["Q4_K", "Q8_0", "BF16"])
def test_inputs_are_those_of_the_reference_for_any_number_of_tokens(type_: str) -> None:
    stored, packed = per_layer_weights(type_)
    x = activations(len(TOKENS), HIDDEN)
    found = cuda.per_layer_inputs(x, TOKENS, packed)
    assert_near(found, reference.per_layer_inputs(x, TOKENS, stored))
    for index in (0, 4):
        assert torch.equal(
            cuda.per_layer_inputs(x[index : index + 1], TOKENS[index : index + 1], packed)[0], found[index]
        )


def test_a_token_that_is_padding_has_no_inputs() -> None:
    _, packed = per_layer_weights("Q8_0")
    x, ids = activations(3, HIDDEN), torch.tensor([4, -1, 5])
    x[1] = torch.nan
    found = cuda.per_layer_inputs(x, ids, packed)
    assert found[1].isnan().all()
    assert found[[0, 2]].isfinite().all()


def gated(type_: str, x: Tensor, inputs: Tensor) -> Activations:
    gate = cuda.prepare(Projection((weight_of(type_, DIM, HIDDEN),)), CPU)
    return cuda.gate_inputs(x, gate, "gelu_tanh", inputs, DIM)


@pytest.mark.parametrize("type_", ["Q8_0", "BF16", "F32"])
def test_a_gate_takes_its_layers_columns_and_leaves_what_the_next_product_takes(type_: str) -> None:
    x, inputs = activations(10, HIDDEN), activations(10, LAYERS * DIM)
    found, gate = gated(type_, x, inputs), Projection((weight_of(type_, DIM, HIDDEN),))
    seen = quantized_values(x) if type_ == "Q8_0" else x
    assert_near(found.floats, reference.gate_inputs(seen, gate, "gelu_tanh", inputs, DIM).floats)
    twin = twin_of(found)
    assert (twin.quantized is None) == (type_ == "F32")
    if twin.quantized is not None:
        assert_left_in_planes(found, twin.planes)
    for index in (0, 7):
        alone = gated(type_, x[index : index + 1], inputs[index : index + 1])
        assert torch.equal(alone.floats[0], found.floats[index])


@pytest.mark.parametrize("norm", [None, norm_of(HIDDEN)], ids=["plain", "norm"])
def test_a_layer_s_scale_multiplies_the_residual_stream_after_the_sum(norm: Norm | None) -> None:
    x, residual, stored = activations(9, DIM), activations(9, HIDDEN), Projection((weight_of("F32", HIDDEN, DIM),))
    expected = reference.project_add(residual, Activations(x), stored, norm, 0.3)
    found = cuda.project_add(residual.clone(), Activations(x), cuda.prepare(stored, CPU), norm, 0.3)
    assert_near(found, expected)
    assert not torch.allclose(found, reference.project_add(residual, Activations(x), stored, norm), rtol=0.1)


def test_embeddings_are_divided_by_their_root_mean_square() -> None:
    weight, ids = weight_of("Q8_0", 7, HIDDEN), torch.tensor([6, 0, 3])
    (table,) = cuda.prepare(Projection((weight,)), CPU).parts
    found = cuda.embed(table, ids, 2.0, 1e-5)
    assert_near(found, reference.embed(weight, ids, 2.0, 1e-5))
    assert torch.equal(cuda.embed(table, ids[1:2], 2.0, 1e-5)[0], found[1])
