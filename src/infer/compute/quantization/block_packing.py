"""Numbers → GGML's blocks: the inverse of `ggml_blocks.numbers_of`, made from the same `BLOCK_FIELDS`."""

import torch
from jaxtyping import Int32, UInt8
from torch import Tensor

from infer.compute.quantization.ggml_blocks import Blocks, Numbers
from infer.compute.quantization.ggml_grids import UE4M3_HALVES, grid
from infer.compute.quantization.ggml_types import BLOCK_FIELDS, BLOCK_TYPES, Bits, BlockFields, Field, Grid, Trits


def blocks_of(numbers: Numbers, type: str) -> Blocks:
    """Return the blocks from which `numbers_of` makes these numbers.

    Codes and small scales must be in the type's range, and codes of a grid must be patterns of the grid.
    """
    fields, kind = BLOCK_FIELDS[type], BLOCK_TYPES[type]
    codes = numbers.codes.view(torch.uint8)
    blocks = torch.zeros(len(codes), kind.block_bytes, dtype=torch.uint8, device=codes.device)
    if isinstance(fields.codes, Grid):
        _put_patterns(blocks, codes, fields.codes, numbers.scales)
    else:
        _put_codes(blocks, codes, fields.codes)
    if fields.scales:
        _put_small(blocks, numbers, fields)
    _put_floats(blocks, numbers, fields)
    return blocks


def _put_codes(
    blocks: Blocks, codes: UInt8[Tensor, "blocks size"], parts: tuple[Field, ...] | tuple[Trits, ...]
) -> None:
    for part in parts:
        if isinstance(part, Trits):
            codes = _put_trits(blocks, codes, part)
    _put(blocks, tuple(part for part in parts if isinstance(part, Field)), codes)


def _put(blocks: Blocks, fields: tuple[Field, ...], numbers: UInt8[Tensor, "blocks size"]) -> None:
    shift = 0
    for at, num_bytes, run, bits in fields:
        part = numbers >> shift
        shift += bits
        if bits < 8:
            part = (part & ((1 << bits) - 1)).reshape(len(part), num_bytes // run, 8 // bits, run)
            shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=part.device)[:, None]
            part = (part << shifts).sum(2, dtype=torch.uint8).flatten(1)
        blocks[:, at : at + num_bytes] |= part


def _put_trits(blocks: Blocks, codes: UInt8[Tensor, "blocks size"], trits: Trits) -> UInt8[Tensor, "blocks rest"]:
    """Store the first codes, and return the others."""
    count = trits.per_byte * trits.run
    digits = codes[:, :count].reshape(-1, trits.per_byte, trits.run).int()
    places = torch.tensor([3 ** (4 - place) for place in range(trits.per_byte)], device=codes.device)
    fraction = (256 * (digits * places[:, None]).sum(1) + 242) // 243
    blocks[:, trits.at : trits.at + trits.run] = fraction.to(torch.uint8)
    return codes[:, count:]


def _put_patterns(blocks: Blocks, codes: UInt8[Tensor, "blocks 256"], form: Grid, scales: Tensor) -> None:
    if form.is_mirrored:
        signs = (scales < 0).repeat_interleave(form.num_signs // scales.shape[1], dim=1).to(torch.int32)
        is_negative = signs.repeat_interleave(256 // form.num_signs, dim=1) > 0
        magnitudes = torch.where(is_negative, 2 - codes.int(), codes.int())
    else:
        places = torch.arange(form.signs.bits, dtype=torch.int32, device=codes.device)
        signs = (codes.int() >> form.sign_shift).reshape(len(codes), -1, 8)[:, :, : form.signs.bits]
        signs = (signs << places).sum(2, dtype=torch.int32)
        magnitudes = codes.int() & ((1 << form.sign_shift) - 1)
    places = torch.arange(0, 16, form.code_bits, dtype=torch.int32, device=codes.device)
    patterns = (magnitudes.reshape(len(codes), -1, form.width) << places).sum(2, dtype=torch.int32)
    known = torch.from_numpy(grid(form.name).astype("i4")).to(codes.device)  # in ascending order
    index = torch.searchsorted(known, patterns, out_int32=True)
    for bits in form.indices:
        _put_bits(blocks, bits, index & ((1 << bits.bits) - 1))
        index = index >> bits.bits
    _put_bits(blocks, form.signs, signs)


def _put_bits(blocks: Blocks, bits: Bits, numbers: Int32[Tensor, "blocks count"]) -> None:
    places = bits.first + bits.step * torch.arange(bits.per_word, dtype=torch.int32, device=blocks.device)
    words = (numbers.reshape(len(numbers), -1, bits.per_word) << places).sum(2, dtype=torch.int32)
    for byte in range(bits.word_bytes):
        first = bits.at + byte
        part = ((words >> 8 * byte) & 0xFF).to(torch.uint8)
        blocks[:, first : first + bits.stride * (words.shape[1] - 1) + 1 : bits.stride] |= part


def _put_small(blocks: Blocks, numbers: Numbers, fields: BlockFields) -> None:
    """Store the small scales, and the small minima after them."""
    small = numbers.scales if numbers.minima is None else torch.cat((numbers.scales, numbers.minima), dim=1)
    small = (small.int().abs() - 1) // 2 if fields.are_scales_odd else small.int() + fields.scale_offset
    if isinstance(fields.scales, Bits):
        _put_bits(blocks, fields.scales, small)
    elif fields.scales == "6 bits":
        blocks[:, 4:16] |= _six_bits(small.to(torch.uint8))
    else:
        _put(blocks, fields.scales, small.to(torch.uint8))


def _six_bits(numbers: UInt8[Tensor, "blocks 16"]) -> UInt8[Tensor, "blocks 12"]:
    """Return the bytes from which `six_bits` makes these eight scales and eight minima."""
    scales, minima = numbers[:, :8], numbers[:, 8:]
    halves = (scales[:, 4:] & 0x0F) | (minima[:, 4:] & 0x0F) << 4
    tops = ((part[:, 4:] & 0x30) << 2 for part in (scales, minima))
    return torch.cat([*(part[:, :4] | top for part, top in zip((scales, minima), tops, strict=True)), halves], dim=1)


def _put_floats(blocks: Blocks, numbers: Numbers, fields: BlockFields) -> None:
    """Store the scale, then the minimum: those of the block, or those of the small ones."""
    if fields.scale_form == "exponent":
        bits = numbers.scales.view(torch.int16).int()
        blocks[:, fields.scale_at, None] = torch.where(bits < 0x80, bits >> 6, (bits >> 7) + 1).to(torch.uint8)
        return
    if fields.scale_form == "UE4M3":
        known = torch.from_numpy(UE4M3_HALVES[:127].view("i2")).to(blocks.device)  # in ascending order
        blocks[:, :4] = torch.searchsorted(known, numbers.scales.view(torch.int16).contiguous()).to(torch.uint8)
        return
    if numbers.supers is None:
        parts = (numbers.scales, numbers.minima)
    else:
        parts = (numbers.supers[:, :1], numbers.supers[:, 1:])
    if fields.scale_form == "nibbles":
        shifts = torch.arange(0, 16, 4, dtype=torch.int32, device=blocks.device)
        nibbles = ((parts[0].contiguous().view(torch.int16).int() >> shifts) & 15) << 4
        blocks[:, fields.scale_at + 1 : fields.scale_at + 8 : 2] |= nibbles.to(torch.uint8)
        return
    for at, part in zip((fields.scale_at, fields.minimum_at), parts, strict=True):
        if at is not None and part is not None:
            blocks[:, at : at + 2] = part.contiguous().view(torch.uint8)
