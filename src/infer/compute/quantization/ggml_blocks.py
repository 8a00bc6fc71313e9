"""GGML's blocks in torch: their numbers, and their conversion to float32.

`dequantize` equals the result of the `gguf` package bit for bit: products and sums in float32, in the same order.
Blocks are those of llama.cpp's ggml-common.h, as `BLOCK_FIELDS` describes them; multi-byte values are little-endian.

Packing numbers into blocks is the inverse of `numbers_of`, made from the same `BLOCK_FIELDS`.
"""

from typing import NamedTuple

import torch
from jaxtyping import BFloat16, Float, Float16, Int32, UInt8
from torch import Tensor

from infer.compute.quantization.ggml_grids import UE4M3_HALVES, grid
from infer.compute.quantization.ggml_types import (
    BLOCK_FIELDS,
    BLOCK_TYPES,
    Bits,
    BlockFields,
    Field,
    Grid,
    ScaleFields,
    Trits,
)
from infer.errors import UnsupportedModelError

Blocks = UInt8[Tensor, "blocks bytes"]
Values = Float[Tensor, "blocks size"]


class Numbers(NamedTuple):
    """Contents of GGML's blocks, separated.

    These are integers or codes, scales and minima per 32 (or 16) of them, and scales per 256.
    """

    codes: Tensor  # uint8, or int8 in Q8_0: [blocks, values]
    scales: Tensor  # f16, f32, bf16 for powers of two, or int8 with `supers`: [blocks, groups]
    minima: Tensor | None = None  # f16, or int8 with `supers`
    supers: Tensor | None = None  # f16: the scale of the scales, then the scale of the minima


_VALUES_AT_ONCE = 1 << 15  # so few that temporary arrays fit a core's cache and need no new pages of the system


def dequantize(data: UInt8[Tensor, "*rows bytes"], type: str) -> Float[Tensor, "*rows columns"]:
    """Return the float32 values of rows stored in a block type, on the device of `data`."""
    if type not in BLOCK_FIELDS:
        raise UnsupportedModelError(
            f"{type} is not a block type that can be dequantised: use one of {', '.join(BLOCK_FIELDS)}"
        )
    kind = BLOCK_TYPES[type]
    blocks = _blocks_of(data, type)
    values = torch.empty(len(blocks), kind.block_size, device=data.device)
    at_once = _VALUES_AT_ONCE // kind.block_size
    for few, out in zip(torch.split(blocks, at_once), torch.split(values, at_once), strict=True):
        out.copy_(_values(few, type))
    values = values.reshape(*data.shape[:-1], data.shape[-1] // kind.block_bytes * kind.block_size)
    if kind.tail_bytes:
        values *= data[..., -kind.tail_bytes :].contiguous().view(torch.float32)
    return values


def _blocks_of(data: UInt8[Tensor, "*rows row_bytes"], type: str) -> Blocks:
    """Return the blocks of all rows, without the scales of rows."""
    kind = BLOCK_TYPES[type]
    if kind.tail_bytes:
        data = data[..., : -kind.tail_bytes]
    return data.reshape(-1, kind.block_bytes)


def _half(blocks: Blocks, start: int) -> Float16[Tensor, "blocks 1"]:
    return blocks[:, start : start + 2].contiguous().view(torch.float16)


def numbers_of(blocks: Blocks, type: str) -> Numbers:
    """Return the numbers of blocks of this type, in order. Numbers are moved, but not changed."""
    fields = BLOCK_FIELDS[type]
    codes = _codes(blocks, fields.codes)
    if fields.is_signed:
        codes = codes.view(torch.int8)
    if fields.scale_form == "exponent":
        return Numbers(codes, _power_of_two(blocks[:, fields.scale_at, None]))
    if fields.scale_form == "UE4M3":
        return Numbers(codes, _ue4m3(blocks[:, :4]))
    has_minimum, floats = fields.minimum_at is not None, _floats(blocks, fields)
    if not fields.scales:
        return Numbers(codes, floats[0], floats[1] if has_minimum else None)
    small = (_small(blocks, fields.scales) - fields.scale_offset).view(torch.int8)
    if fields.are_scales_odd:
        small = 2 * small + 1
    if isinstance(fields.codes, Grid) and fields.codes.is_mirrored:
        small = torch.where(_signs(blocks, fields.codes)[:, :: 256 // small.shape[1]] > 0, -small, small)
    scales, minima = small.chunk(2, dim=1) if has_minimum else (small, None)
    return Numbers(codes, scales, minima, torch.cat(floats, dim=1))


def scales_of(data: UInt8[Tensor, "*rows bytes"], type: str) -> Float[Tensor, "blocks numbers"]:
    """Return the numbers that scale whole blocks: the scale, or the scales of NVFP4, and then the minimum."""
    fields, blocks = BLOCK_FIELDS[type], _blocks_of(data, type)
    if fields.scale_form == "exponent":
        return _power_of_two(blocks[:, fields.scale_at, None])
    if fields.scale_form == "UE4M3":
        return _ue4m3(blocks[:, :4])
    return torch.cat(_floats(blocks, fields), dim=1)


def _floats(blocks: Blocks, fields: BlockFields) -> list[Float[Tensor, "blocks 1"]]:
    if fields.scale_form == "nibbles":
        return [_half_in_nibbles(blocks, fields.scale_at)]
    if fields.scale_form == "f32":
        return [blocks[:, fields.scale_at : fields.scale_at + 4].contiguous().view(torch.float32)]
    return [_half(blocks, at) for at in (fields.scale_at, fields.minimum_at) if at is not None]


def _values(blocks: Blocks, type: str) -> Values:
    fields, numbers = BLOCK_FIELDS[type], numbers_of(blocks, type)
    scales, minima = numbers.scales.float(), None if numbers.minima is None else numbers.minima.float()
    if numbers.supers is not None:
        supers = numbers.supers.float() * fields.factor
        scales = supers[:, :1] * scales
        minima = None if minima is None else supers[:, 1:] * minima
    if fields.table:
        q = torch.tensor(fields.table, dtype=torch.float32, device=blocks.device)[numbers.codes.int()]
    else:
        q = numbers.codes.float()
    if fields.offset:
        q.sub_(fields.offset)
    groups = scales.shape[1]
    values = q.view(len(q), groups, q.shape[1] // groups).mul_(scales[:, :, None])
    if minima is not None:
        values.add_(minima[:, :, None], alpha=1 if numbers.supers is None else -1)
    return values.flatten(1)


def _codes(blocks: Blocks, codes: tuple[Field, ...] | tuple[Trits, ...] | Grid) -> UInt8[Tensor, "blocks size"]:
    if isinstance(codes, Grid):
        return _grid_codes(blocks, codes)
    parts = [_trits(blocks, part) for part in codes if isinstance(part, Trits)]
    return torch.cat(parts, dim=1) if parts else _read(blocks, tuple(part for part in codes if isinstance(part, Field)))


def _trits(blocks: Blocks, trits: Trits) -> UInt8[Tensor, "blocks size"]:
    """Return numbers of base 3. A digit is the integer part of 3 × the fraction that the earlier digits leave."""
    powers = torch.tensor([3**place for place in range(trits.per_byte)], dtype=torch.uint8, device=blocks.device)
    left = blocks[:, None, trits.at : trits.at + trits.run] * powers[:, None]
    return ((left.int() * 3) >> 8).to(torch.uint8).flatten(1)


def _grid_codes(blocks: Blocks, codes: Grid) -> UInt8[Tensor, "blocks 256"]:
    count, index, shift = 256 // codes.width, torch.zeros(1, dtype=torch.int32, device=blocks.device), 0
    for bits in codes.indices:
        index = index | _bits(blocks, bits, count) << shift
        shift += bits.bits
    patterns = torch.from_numpy(grid(codes.name).astype("i4")).to(blocks.device)[index]
    places = torch.arange(0, 16, codes.code_bits, dtype=torch.int32, device=blocks.device)
    found = ((patterns[:, :, None] >> places) & ((1 << codes.code_bits) - 1)).flatten(1).to(torch.uint8)
    signs = _signs(blocks, codes)
    return torch.where(signs > 0, 2 - found, found) if codes.is_mirrored else found | signs << codes.sign_shift


def _signs(blocks: Blocks, codes: Grid) -> UInt8[Tensor, "blocks 256"]:
    """Return 1 for each negative code."""
    signs = _bits(blocks, codes.signs, codes.num_signs)
    if codes.signs.bits == 1:
        return signs.to(torch.uint8).repeat_interleave(256 // codes.num_signs, dim=1)
    if codes.signs.bits == 7:
        parity = signs ^ (signs >> 4)
        parity = parity ^ (parity >> 2)
        signs = signs | ((parity ^ (parity >> 1)) & 1) << 7
    places = torch.arange(8, dtype=torch.int32, device=blocks.device)
    return ((signs[:, :, None] >> places) & 1).flatten(1).to(torch.uint8)


def _bits(blocks: Blocks, bits: Bits, count: int) -> Int32[Tensor, "blocks count"]:
    words = torch.zeros(1, dtype=torch.int32, device=blocks.device)
    for byte in range(bits.word_bytes):
        first = bits.at + byte
        these = blocks[:, first : first + bits.stride * (count // bits.per_word - 1) + 1 : bits.stride]
        words = words | these.int() << 8 * byte
    places = bits.first + bits.step * torch.arange(bits.per_word, dtype=torch.int32, device=blocks.device)
    return ((words[:, :, None] >> places) & ((1 << bits.bits) - 1)).flatten(1)


def _small(blocks: Blocks, scales: ScaleFields) -> UInt8[Tensor, "blocks groups"]:
    if scales == "6 bits":
        return six_bits(blocks[:, 4:16])
    if isinstance(scales, Bits):
        return _bits(blocks, scales, scales.per_word * 4 if scales.per_word > 1 else 8).to(torch.uint8)
    return _read(blocks, scales)


def _read(blocks: Blocks, fields: tuple[Field, ...]) -> UInt8[Tensor, "blocks size"]:
    """Return a block's numbers. Their bits are in these fields, the lowest first."""
    numbers, shift = None, 0
    for at, num_bytes, run, bits in fields:
        packed = blocks[:, at : at + num_bytes]
        if bits < 8:
            shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=blocks.device)[:, None]
            runs = packed.reshape(len(packed), num_bytes // run, 1, run)
            packed = ((runs >> shifts) & ((1 << bits) - 1)).flatten(1)
        numbers = packed if numbers is None else numbers.bitwise_or_(packed << shift)
        shift += bits
    assert numbers is not None
    return numbers


def six_bits(packed: UInt8[Tensor, "blocks 12"]) -> UInt8[Tensor, "blocks 16"]:
    """Return Q4_K's and Q5_K's eight scales and eight minima of 6 bits, from 12 bytes.

    The first four scales and minima are the low 6 bits of bytes 0–3 and 4–7. The top 2 bits of these bytes complete the
    last four, whose low 4 bits are the halves of bytes 8–11.
    """
    first, second, halves = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = first & 0x3F, (halves & 0x0F) | ((first >> 2) & 0x30)
    minima = second & 0x3F, (halves >> 4) | ((second >> 2) & 0x30)
    return torch.cat((*scales, *minima), dim=1)


def _power_of_two(exponents: UInt8[Tensor, "blocks 1"]) -> BFloat16[Tensor, "blocks 1"]:
    """Return 2^(e − 128), which bf16 can represent for every e."""
    e = exponents.to(torch.int16)
    return torch.where(e < 2, 0x20 << e.clamp(max=1), (e - 1).clamp(min=0) << 7).to(torch.int16).view(torch.bfloat16)


def _half_in_nibbles(blocks: Blocks, start: int) -> Float16[Tensor, "blocks 1"]:
    """Return the f16 whose four nibbles are the highest ones of four words, the lowest first."""
    highest = blocks[:, start + 1 : start + 8 : 2].int() >> 4
    bits = highest[:, 0] | highest[:, 1] << 4 | highest[:, 2] << 8 | highest[:, 3] << 12
    return bits.to(torch.int16).view(torch.float16)[:, None]


def _ue4m3(codes: UInt8[Tensor, "blocks 4"]) -> Float16[Tensor, "blocks 4"]:
    """Return half of the values of unsigned E4M3 numbers."""
    return torch.from_numpy(UE4M3_HALVES.view("i2")).to(codes.device)[codes.int()].view(torch.float16)


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
