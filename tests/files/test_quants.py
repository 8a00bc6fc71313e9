import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from infer.compute.quantization.ggml_blocks import dequantize
from infer.compute.quantization.ggml_grids import grid
from infer.compute.quantization.ggml_types import BLOCK_FIELDS, BLOCK_TYPES, GGML_TYPES, Bits, Field, Grid, Trits
from infer.errors import UnsupportedModelError

GGML = [kind.name for kind in GGML_TYPES.values()]
QUANTISED = [name for name in GGML if not BLOCK_TYPES[name].is_float]
KNOWN = [name for name in QUANTISED if name not in ("Q1_0", "Q2_0")]  # to the gguf package
DATA = Path(__file__).parents[1] / "data"


def gguf_values(data: np.ndarray, name: str) -> np.ndarray:
    with np.errstate(all="ignore"):
        return gguf.quants.dequantize(data, gguf.GGMLQuantizationType[name])


def assert_same_bits(ours: np.ndarray, theirs: np.ndarray) -> None:
    assert ours.dtype == theirs.dtype == np.float32
    assert ours.shape == theirs.shape
    numbers = ~np.isnan(theirs)
    assert np.array_equal(np.isnan(ours), ~numbers)
    assert np.array_equal(ours.view(np.uint32)[numbers], theirs.view(np.uint32)[numbers])


@pytest.mark.parametrize("name", [name for name in GGML if name != "Q2_0"])
def test_types_are_ggml_types(name: str) -> None:
    kind = BLOCK_TYPES[name]
    assert gguf.GGMLQuantizationType[name].value == kind.ggml_id
    assert gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]] == (kind.block_size, kind.block_bytes)


def taken_bits(part: Field | Bits | Trits, count: int) -> Iterator[int]:
    """Yield the places of a block's bits that a field's first `count` numbers take."""
    if isinstance(part, Bits):
        for number in range(count):
            word, within = divmod(number, part.per_word)
            start = 8 * (part.at + part.stride * word) + part.first + part.step * within
            yield from range(start, start + part.bits)
    else:
        yield from range(8 * part.at, 8 * (part.at + (part.run if isinstance(part, Trits) else part.num_bytes)))


@pytest.mark.parametrize("name", QUANTISED)
def test_fields_have_every_bit_of_a_block_once(name: str) -> None:
    fields, taken, kind = BLOCK_FIELDS[name], Counter[int](), BLOCK_TYPES[name]
    codes, scales = fields.codes, (Field(4, 12, 4, 2),) if fields.scales == "6 bits" else fields.scales
    if isinstance(codes, Grid):
        for part in codes.indices:
            taken.update(taken_bits(part, kind.block_size // codes.width))
        taken.update(taken_bits(codes.signs, codes.num_signs))
    else:
        for part in codes:
            taken.update(taken_bits(part, 0))
    for part in (scales,) if isinstance(scales, Bits) else scales:
        taken.update(taken_bits(part, 4 * part.per_word if name == "IQ1_M" else 8) if part else ())
    if fields.scale_form == "nibbles":
        taken.update(8 * (fields.scale_at + 2 * place + 1) + bit for place in range(4) for bit in range(4, 8))
    else:
        size = {"f16": 16, "exponent": 8, "UE4M3": 32}[fields.scale_form]
        taken.update(range(8 * fields.scale_at, 8 * fields.scale_at + size))
    if fields.minimum_at is not None:
        taken.update(range(8 * fields.minimum_at, 8 * fields.minimum_at + 16))
    assert taken == Counter(range(8 * kind.block_bytes))


@pytest.mark.parametrize("name", [name for name in QUANTISED if isinstance(BLOCK_FIELDS[name].codes[0], Field)])
def test_fields_of_one_number_have_the_same_count(name: str) -> None:
    fields = BLOCK_FIELDS[name]
    for parts in (fields.codes, fields.scales):
        if parts and parts != "6 bits":
            assert len({8 * part.num_bytes // part.bits for part in parts}) == 1


@pytest.mark.parametrize("name", KNOWN)
def test_random_blocks_dequantise_to_the_bits_that_gguf_gives(name: str) -> None:
    data = np.random.default_rng(0).integers(0, 256, (100, 100 * BLOCK_TYPES[name].block_bytes), dtype=np.uint8)
    assert_same_bits(dequantize(torch.from_numpy(data), name).numpy(), gguf_values(data, name))


@pytest.mark.parametrize("name", ["Q1_0", "Q2_0"])
def test_types_that_gguf_does_not_know_dequantise_to_the_bits_that_ggml_gives(name: str) -> None:
    for stored in json.loads((DATA / "ggml-values.json").read_text())[name]:
        block = torch.frombuffer(bytearray.fromhex(stored["block"]), dtype=torch.uint8)
        assert_same_bits(dequantize(block, name).numpy(), np.frombuffer(bytes.fromhex(stored["values"]), "<f4"))


GRIDS = {"IQ1": gguf.quants.IQ1_S, "IQ2_XXS": gguf.quants.IQ2_XXS, "IQ2_XS": gguf.quants.IQ2_XS}
GRIDS |= {"IQ2_S": gguf.quants.IQ2_S, "IQ3_XXS": gguf.quants.IQ3_XXS, "IQ3_S": gguf.quants.IQ3_S}


@pytest.mark.parametrize("name", GRIDS)
def test_grids_have_the_patterns_of_gguf(name: str) -> None:
    theirs = GRIDS[name]
    theirs.init_grid()
    width, levels = theirs.grid_shape[1], np.array(theirs.grid_map)
    codes = grid(name)[:, None] >> (16 // width * np.arange(width)) & ((1 << 16 // width) - 1)
    assert np.array_equal(levels[codes], theirs.grid.reshape(theirs.grid_shape))


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
    with pytest.raises(UnsupportedModelError, match=r"Q8_K .* Q4_K"):
        dequantize(torch.zeros(1, 292, dtype=torch.uint8), "Q8_K")
