"""The storage of keys and values: each kv type's definition, and the kernels that write and read its blocks."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from extent import slow_except
from infer.compute.backends import reference
from infer.compute.backends.cpu import operations as cpu
from infer.compute.kvcache.paged import PagedCache
from infer.compute.operands.activation_values import Activations
from infer.compute.operands.mixers import Attention
from infer.compute.operands.step import Step
from infer.compute.operands.weights import Heads
from infer.compute.quantization import kv_formats, kv_layout
from infer.compute.quantization.kv_formats import BLOCK_POSITIONS, KV_TYPES, key_block_bytes, value_block_bytes
from infer.compute.quantization.kv_layout import mix
from infer.errors import InvalidRequestError
from layer_caches import attend_in_steps, make_heads, make_layer, threads
from steps import join

CPU = torch.device("cpu")
CAPACITY = 640
SHAPES = [(3, 3, 32), (9, 3, 64), (7, 1, 96), (8, 2, 128), (4, 1, 256)]  # groups of 1, 3, 7, 4
EACH_TYPE = pytest.mark.parametrize("kv_type", slow_except(("f32", "f16"), KV_TYPES))
INFINITY_AND_NAN = {"q8": 0x7E, "q4": 0x7E, "f16": 0x7E, "bf16": 0x7F, "f32": 0x7F}  # a byte; all of them: not finite


def make_qkv(heads: Heads, count: int, seed: int = 0) -> Tensor:
    features = (heads.num_heads + 2 * heads.num_kv_heads) * heads.head_dim
    return torch.randn(count, features, generator=torch.manual_seed(seed))


def attend_in(
    sizes: list[int], heads: Heads, kv_type: str, row: int = 0, fill: int = 0, window: int | None = None
) -> Tensor:
    """Return the outputs of all tokens, computed in steps of `sizes` tokens."""
    layer = make_layer(heads, 2, CAPACITY, kv_type, window=window, fill=fill)
    return attend_in_steps(heads, layer, make_qkv(heads, sum(sizes)), sizes, row=row)


@given(st.integers(0, 2**32), st.floats(-3, 3), st.floats(-10, 10))
@settings(max_examples=50, deadline=None)
def test_stored_values_are_within_half_a_step(seed: int, exponent: float, shift: float) -> None:
    x = (torch.randn(5, 64, generator=torch.manual_seed(seed)) + shift) * 10**exponent
    groups, mixed = x.view(5, 2, 32), mix(x).view(5, 2, 32)
    largest, spread = groups.abs().amax(-1), groups.amax(-1) - groups.amin(-1)
    tiny = 1e-6 + largest * 2**-11  # halves are rounded, too
    for found, expected, step in (
        (mix(kv_layout.decode_keys(kv_layout.encode_keys(x, "q4"), "q4")), mixed, mixed.abs().amax(-1) / 127),
        (kv_layout.decode_values(kv_layout.encode_values(x, "q8"), "q8"), groups, largest / 127),
        (kv_layout.decode_values(kv_layout.encode_values(x, "q4"), "q4"), groups, spread / 15),
    ):
        assert ((found.view(5, 2, 32) - expected).abs().amax(-1) <= step * 0.51 + tiny).all()


def test_mixing_is_a_rotation_and_its_own_inverse() -> None:
    x, y = torch.randn(2, 7, 96)
    assert torch.allclose(mix(mix(x)), x, atol=1e-5)
    assert torch.allclose((mix(x) * mix(y)).sum(-1), (x * y).sum(-1), atol=1e-4)
    outlier = torch.zeros(32)
    outlier[5] = 8
    assert torch.allclose(mix(outlier).abs(), torch.full((32,), 2**0.5))


@pytest.mark.parametrize("kv_type", KV_TYPES)
def test_zeros_and_equal_values_are_exact_and_infinities_stay_visible(kv_type: str) -> None:
    for part in ("keys", "values"):
        encode, decode = (getattr(kv_layout, f"{verb}_{part}") for verb in ("encode", "decode"))
        for value in (0.0, 1.5, -2.0):
            x = torch.full((3, 64), value)
            assert torch.allclose(decode(encode(x, kv_type), kv_type), x, rtol=1e-3)
        x = torch.randn(2, 64)
        x[1, 40] = math.nan
        found = decode(encode(x, kv_type), kv_type)
        assert torch.isfinite(found[0]).all()
        assert not torch.isfinite(found[1, 40])


@pytest.mark.parametrize("kv_type", KV_TYPES)
@pytest.mark.parametrize("parts_of", [kv_layout.key_parts, kv_layout.value_parts])
def test_the_parts_of_a_block_share_out_its_bytes(kv_type: str, parts_of) -> None:  # type: ignore[no-untyped-def]
    size = key_block_bytes(kv_type, 64) if parts_of is kv_layout.key_parts else value_block_bytes(kv_type, 64)
    owners = torch.full((BLOCK_POSITIONS, 2, size), 255, dtype=torch.uint8)
    for lane in range(BLOCK_POSITIONS):
        blocks = torch.zeros(2, size, dtype=torch.uint8)
        for part in parts_of(blocks, kv_type):
            part[:, lane].view(torch.uint8 if part.element_size() == 1 else part.dtype).fill_(1)
        owners[lane] = blocks != 0
    for lane in range(BLOCK_POSITIONS):
        assert not (owners[lane] & owners[:lane].any(0)).any(), "two positions share a byte"
    parts = parts_of(torch.zeros(2, size, dtype=torch.uint8), kv_type)
    assert sum(part.numel() * part.element_size() for part in parts) == 2 * size


@pytest.mark.parametrize("shape", SHAPES)
@EACH_TYPE
def test_kernels_store_the_bytes_and_find_the_sums_of_the_definition(kv_type: str, shape: tuple[int, int, int]) -> None:
    heads, window = make_heads(*shape), 100 if shape[0] == 8 else None
    mine, defined = (make_layer(heads, 2, CAPACITY, kv_type, window=window) for _ in range(2))
    start = 0
    for index, count in enumerate((5, 1, 300, 4, 200, 2)):
        qkv, step = make_qkv(heads, count, seed=index), Step.of([1] * count, start, row=1)
        actual = cpu.attend(Activations(qkv), heads, mine, step).floats
        expected = reference.attend(Activations(qkv), heads, defined, step).floats
        assert (actual - expected).abs().max() <= 3e-6 * expected.abs().max()
        start += count
    # The last bit of a rotation may differ, and a few values that are rounded after it.
    assert (mine.keys != defined.keys).sum() <= (1e-4 if kv_type in kv_formats.QUANTIZED else 1) * mine.keys.numel()
    assert torch.equal(mine.values, defined.values)


@pytest.mark.slow
@pytest.mark.parametrize("kv_type", kv_formats.QUANTIZED)
def test_threads_and_neighbours_change_no_bit(kv_type: str) -> None:
    heads = make_heads(7, 1, 64)
    expected = attend_in([290, 1, 3], heads, kv_type)
    for num_threads in (1, 2, 3):
        with threads(num_threads):
            assert torch.equal(attend_in([290, 1, 3], heads, kv_type), expected)
    layer, qkv = make_layer(heads, 3, CAPACITY, kv_type), make_qkv(heads, 294)
    for start, count in ((0, 290), (290, 1), (291, 3)):
        step = join([Step.of([1] * count, start, row=row) for row in (0, 2, 1)])
        both = cpu.attend(Activations(qkv[start : start + count].repeat(3, 1)), heads, layer, step).floats
        assert torch.equal(both.view(3, count, -1), expected[start : start + count].expand(3, -1, -1))


@EACH_TYPE
def test_values_after_the_last_position_have_no_effect(kv_type: str) -> None:
    heads, fills = make_heads(9, 3, 64), (0, INFINITY_AND_NAN[kv_type])
    assert torch.equal(*(attend_in([20, 1, 1, 9], heads, kv_type, fill=fill) for fill in fills))


@EACH_TYPE
def test_a_row_goes_from_cache_to_cache(kv_type: str) -> None:
    heads = make_heads(6, 2, 64)
    layers = [Attention(num_heads=6, num_kv_heads=2, head_dim=64, rope=None, scale=0.125)] * 2
    cache, other = (PagedCache(layers, 2, 64, kv_type, CPU, step_tokens=64) for _ in range(2))
    cache.reserve(1, 64)
    qkv = make_qkv(heads, 41)
    for layer in range(2):
        cache.attend(layer, Activations(qkv[:40]), heads, Step.of([1] * 40, row=1))
    cache.commit(1, 37)
    tensors = {name: tensor.clone() for name, tensor in cache.export_row(1)}
    num_bytes = sum(tensor.nbytes for name, tensor in tensors.items() if name != "states")
    per_block = 2 * 2 * (key_block_bytes(kv_type, 64) + value_block_bytes(kv_type, 64))
    assert num_bytes == 37 * per_block // BLOCK_POSITIONS
    other.import_row(0, tensors, 37)
    other.copy_row(1, 0)
    expected = cache.attend(1, Activations(qkv[37:41]), heads, Step.of([1] * 4, 37, row=1)).floats.clone()
    for row in range(2):
        other.reserve(row, 4)
        step = Step.of([1] * 4, 37, row=row)
        assert torch.equal(other.attend(1, Activations(qkv[37:41]), heads, step).floats, expected)
    wrong = {name: tensor if name == "states" else tensor[:, 1:] for name, tensor in tensors.items()}
    with pytest.raises(InvalidRequestError, match=r"0\.keys\.0"):
        other.import_row(0, wrong, 37)
    assert other.lengths == [37, 37]
