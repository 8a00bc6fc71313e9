from collections import Counter

import gguf
import numpy as np
import pytest
import torch

from infer.errors import UnsupportedModelError
from infer.quantization.ggml_blocks import dequantize, quantize, quantize_fitted
from infer.quantization.ggml_types import BLOCK_FIELDS, BLOCK_TYPES, Field

QUANTISED = [name for name, kind in BLOCK_TYPES.items() if not kind.is_float]


def gguf_values(data: np.ndarray, name: str) -> np.ndarray:
    with np.errstate(all="ignore"):
        return gguf.quants.dequantize(data, gguf.GGMLQuantizationType[name])


@pytest.mark.parametrize("name", BLOCK_TYPES)
def test_types_are_ggml_types(name: str) -> None:
    kind = BLOCK_TYPES[name]
    assert gguf.GGMLQuantizationType[name].value == kind.ggml_id
    assert gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]] == (kind.block_size, kind.block_bytes)


@pytest.mark.parametrize("name", QUANTISED)
def test_fields_have_every_byte_of_a_block_once(name: str) -> None:
    fields, taken = BLOCK_FIELDS[name], Counter[int]()
    scales = (Field(4, 12, 4, 2),) if fields.scales == "6 bits" else fields.scales
    for field in (*fields.codes, *scales):
        taken.update(range(field.at, field.at + field.num_bytes))
    taken.update(range(fields.scale_at, fields.scale_at + (1 if fields.has_exponent else 2)))
    if fields.minimum_at is not None:
        taken.update(range(fields.minimum_at, fields.minimum_at + 2))
    assert taken == Counter(range(BLOCK_TYPES[name].block_bytes))
    for first, *above in (fields.codes, *([scales] if isinstance(fields.scales, tuple) and scales else [])):
        counts = {8 * field.num_bytes // field.bits for field in (first, *above)}
        assert len(counts) == 1


@pytest.mark.parametrize("name", QUANTISED)
def test_random_blocks_dequantise_to_the_bits_that_gguf_gives(name: str) -> None:
    data = np.random.default_rng(0).integers(0, 256, (100, 100 * BLOCK_TYPES[name].block_bytes), dtype=np.uint8)
    ours, theirs = dequantize(torch.from_numpy(data), name).numpy(), gguf_values(data, name)
    assert ours.dtype == theirs.dtype == np.float32
    assert ours.shape == theirs.shape
    numbers = ~np.isnan(theirs)
    assert np.array_equal(np.isnan(ours), ~numbers)
    assert np.array_equal(ours.view(np.uint32)[numbers], theirs.view(np.uint32)[numbers])


@pytest.mark.parametrize("name", QUANTISED)
def test_any_leading_shape_is_kept_also_none_and_no_rows(name: str) -> None:
    kind = BLOCK_TYPES[name]
    data = torch.randint(0, 256, (2, 3, 2 * kind.block_bytes), dtype=torch.uint8)
    whole = dequantize(data, name)
    assert whole.shape == (2, 3, 2 * kind.block_size)
    assert torch.equal(dequantize(data[1, 2], name).nan_to_num(), whole[1, 2].nan_to_num())
    assert dequantize(data[:0], name).shape == (0, 3, 2 * kind.block_size)


@pytest.mark.parametrize("name", QUANTISED)
def test_rows_that_are_not_contiguous_give_the_same_values(name: str) -> None:
    data = torch.randint(0, 256, (6, 4 * BLOCK_TYPES[name].block_bytes), dtype=torch.uint8)
    assert torch.equal(dequantize(data[::2], name).nan_to_num(), dequantize(data, name)[::2].nan_to_num())


def test_dequantising_leaves_the_stored_bytes_alone() -> None:
    for name in QUANTISED:
        data = torch.randint(0, 256, (3, BLOCK_TYPES[name].block_bytes), dtype=torch.uint8)
        before = data.clone()
        dequantize(data, name)
        assert torch.equal(data, before)


def test_an_unknown_type_is_named_with_those_that_are_known() -> None:
    with pytest.raises(UnsupportedModelError, match=r"IQ3_S .* Q4_K"):
        dequantize(torch.zeros(1, 110, dtype=torch.uint8), "IQ3_S")


@pytest.mark.parametrize("name", ["Q8_0", "Q4_1"])
def test_quantize_equals_gguf_bit_for_bit(name: str) -> None:
    generator = torch.Generator().manual_seed(1)
    values = torch.randn(300, 320, generator=generator) * torch.logspace(-6, 3, 300)[:, None]
    values[7] = 0.0
    values[8, :64] = torch.arange(64) / 2  # ties
    theirs = gguf.quants.quantize(values.numpy(), gguf.GGMLQuantizationType[name])
    assert torch.equal(quantize(values, name), torch.from_numpy(theirs.copy()))


def squared_error(values: torch.Tensor, data: torch.Tensor) -> float:
    return float((dequantize(data, "Q4_1") - values).square().sum())


@pytest.mark.parametrize("magnitude", [1e-3, 0.02, 10.0])
def test_a_fitted_block_is_never_worse_than_a_plain_one_and_better_on_the_whole(magnitude: float) -> None:
    values = torch.randn(64, 256, generator=torch.Generator().manual_seed(1)) * magnitude
    fitted, plain = quantize_fitted(values), quantize(values, "Q4_1")
    assert fitted.shape == plain.shape
    for row in range(64):
        assert squared_error(values[row], fitted[row]) <= squared_error(values[row], plain[row]) * (1 + 1e-5)
    assert squared_error(values, fitted) < 0.9 * squared_error(values, plain)


def test_fitting_finds_values_that_four_bits_hold() -> None:
    exact = torch.arange(32).remainder(16).float().repeat(3, 2) * 0.25 - 1.5
    assert torch.equal(dequantize(quantize_fitted(exact), "Q4_1"), exact)
    for value in (0.0, 0.5):
        constant = torch.full((2, 64), value)
        assert torch.equal(dequantize(quantize_fitted(constant), "Q4_1"), constant)
