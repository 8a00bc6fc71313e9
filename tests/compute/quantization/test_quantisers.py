"""Claims about quantised weights: blocks are packed as they are read, and no type has a larger error than ggml's."""

import json
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from extent import slow_except
from infer.compute.quantization.ggml_blocks import blocks_of, dequantize, numbers_of
from infer.compute.quantization.ggml_types import BLOCK_FIELDS, BLOCK_TYPES
from infer.compute.quantization.quantisers import GRID_TYPES, QUANTISED_TYPES, quantise
from infer.errors import ModelError, UnsupportedModelError
from refusals import check_refused

# Mean squared errors of ggml_quantize_chunk (ggml 0.25.3) for `heavy_values`: without and with its importance.
GGML_ERRORS = json.loads((Path(__file__).parents[2] / "data" / "ggml-quantiser-errors.json").read_text())


def heavy_values() -> tuple[torch.Tensor, torch.Tensor]:
    noise = np.random.default_rng(0)
    values = noise.standard_normal((64, 1024), np.float32) * np.exp(0.5 * noise.standard_normal((64, 1024), np.float32))
    return torch.from_numpy(values), torch.from_numpy(np.exp(noise.standard_normal(1024, np.float32)))


def error(values: torch.Tensor, data: torch.Tensor, name: str) -> torch.Tensor:
    return (dequantize(data, name).double() - values.double()).square()


@pytest.mark.parametrize("name", slow_except({*GGML_ERRORS} - {*GRID_TYPES}, [*GGML_ERRORS]))
def test_errors_are_at_most_those_of_ggml(name: str) -> None:
    values, importance = heavy_values()
    plain, weighted = GGML_ERRORS[name]
    slack = 0.92 if name in GRID_TYPES else 0.99
    if name in ("Q8_0", "Q1_0"):  # their blocks are ggml's
        slack = 1 + 1e-5
    if plain is None:
        check_refused(lambda: quantise(values, name), "needs an importance matrix")
    else:
        assert error(values, quantise(values, name), name).mean() <= slack * plain
    found = (error(values, quantise(values, name, importance), name) * importance).mean()
    assert found <= (0.99 if name == "Q1_0" else slack) * weighted


@pytest.mark.parametrize("name", [name for name in BLOCK_FIELDS if BLOCK_TYPES[name].ggml_id is not None])
def test_packed_numbers_are_read_again_and_canonical_blocks_keep_every_bit(name: str) -> None:
    noise = torch.Generator().manual_seed(1)
    blocks = torch.randint(0, 256, (64, BLOCK_TYPES[name].block_bytes), dtype=torch.uint8, generator=noise)
    if name == "NVFP4":  # a scale's sign bit is ignored, and its largest code means 0
        blocks[:, :4] = (blocks[:, :4] & 0x7F).clamp(max=0x7E)
    numbers = numbers_of(blocks, name)
    packed = blocks_of(numbers, name)
    if name != "TQ1_0":  # a byte has one of 243 numbers
        assert torch.equal(packed, blocks)
    for given, read in zip(numbers, numbers_of(packed, name), strict=True):
        assert (given is None) == (read is None)
        if given is not None and read is not None:
            assert torch.equal(read.contiguous().view(torch.uint8), given.contiguous().view(torch.uint8))


@pytest.mark.parametrize("name", ["F32", "F16", "BF16", "Q8_0"])
def test_types_without_a_search_equal_gguf_bit_for_bit(name: str) -> None:
    values = torch.randn(300, 320, generator=torch.Generator().manual_seed(1)) * torch.logspace(-6, 3, 300)[:, None]
    values[7] = 0.0
    values[8, :64] = torch.arange(64) / 2  # ties
    theirs = gguf.quants.quantize(values.numpy(), gguf.GGMLQuantizationType[name])
    assert torch.equal(quantise(values, name), torch.from_numpy(theirs.view(np.uint8).copy()))


@pytest.mark.parametrize("name", [name for name in QUANTISED_TYPES if name not in GRID_TYPES])
def test_values_that_a_type_holds_are_kept(name: str) -> None:
    steps = torch.arange(512).remainder(2).mul(2).sub(1).float().repeat(3, 1) * 0.5
    steps[1] = 0.5 if name not in ("Q2_K", "Q4_K", "Q5_K") else -0.5
    steps[2] = 0.0 if name != "Q1_0" else -0.5
    data = quantise(steps, name)
    found = data.view(torch.float32) if name == "F32" else data
    if name in ("F16", "BF16"):
        found = data.view(torch.float16 if name == "F16" else torch.bfloat16).float()
    elif name != "F32":
        found = dequantize(data, name)
    assert (found - steps).abs().max() <= (0.03 if name in ("NVFP4", "IQ4_NL", "IQ4_XS") else 2e-3)


@pytest.mark.parametrize("name", slow_except(["Q4_1", "Q4_K"], ["Q4_1", "Q4_K", "IQ4_NL", "IQ1_S", "IQ3_XXS"]))
def test_rows_do_not_depend_on_their_neighbours(name: str) -> None:
    values = torch.randn(90, 768, generator=torch.Generator().manual_seed(1))
    importance = torch.rand(768, generator=torch.Generator().manual_seed(2))
    values[88] = 0
    whole = quantise(values, name, importance)
    assert torch.equal(whole[86:89], quantise(values[86:89], name, importance))
    assert not dequantize(whole[88], name).any()


def test_importance_of_zero_everywhere_counts_as_none_and_of_a_group_keeps_its_values() -> None:
    values = torch.randn(4, 512, generator=torch.Generator().manual_seed(1))
    assert torch.equal(quantise(values, "Q4_K", torch.zeros(512)), quantise(values, "Q4_K"))
    importance = torch.ones(512)
    importance[:256] = 0
    assert torch.equal(quantise(values, "Q4_K", importance)[:, :144], quantise(values, "Q4_K")[:, :144])


@pytest.mark.parametrize(("name", "value"), [("Q4_K", float("nan")), ("F16", 1e6), ("Q4_0", float("inf"))])
def test_values_that_no_block_can_hold_are_refused(name: str, value: float) -> None:
    values = torch.zeros(2, 256)
    values[1, 3] = value
    check_refused(lambda: quantise(values, name), "not finite, or too large", ModelError)


def test_a_type_without_a_quantiser_is_named_with_those_that_have_one() -> None:
    check_refused(lambda: quantise(torch.zeros(1, 256), "Q8_1"), r"Q8_1 .* Q4_K", UnsupportedModelError)
