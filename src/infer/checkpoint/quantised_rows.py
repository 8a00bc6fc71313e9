"""Rows of a quantised matrix of a folder (`quantised_tensors`), read as blocks of a type that the kernels have.

    Q4_0 (q − 8) s   Q5_0 (q − 16) s   Q8_0 q s   Q4_1 q s + m   MXFP4   F16

Integers are moved, and never rounded. A code less its zero point has 5 bits, so codes of 4 bits with zero points become
Q5_0, whose numbers are exactly those of the file. A scale becomes f16: unchanged if the file has f16, or bf16 from 2⁻¹⁷
on; otherwise rounded once. Matrices that no block holds become F16: each number is computed in float32, then rounded.
"""

from typing import NoReturn, final

import numpy as np
import torch
from jaxtyping import Float, Float32, Int, UInt8
from torch import Tensor

from infer.checkpoint.tensor_bytes import bytes_of
from infer.checkpoint.tensor_info import PackedParts, TensorInfo
from infer.errors import ModelFormatError
from infer.quantization.ggml_types import FP4_VALUES

_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # the place in a word of each of eight neighbouring codes
_BLOCK = 32
_LARGEST_HALF = 65504.0
_DTYPES = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
}
_OFFSETS = {"Q4_0": 8, "Q5_0": 16, "Q8_0": 0}  # of the codes in blocks


@final
class QuantisedRows:
    """Reads rows of one quantised matrix. Scales and zero points are kept from the first read on.

    Codes that the file has in the order of columns are kept too, until each row has been read once.
    """

    def __init__(self, info: TensorInfo, packed: PackedParts) -> None:
        self.type, self.packed = info.type, packed
        self._words: Tensor | None = None  # of GPTQ and AWQ
        self._num_read = 0
        self._scales: Tensor | None = None  # [groups of rows, groups of columns]
        self._zeros: Tensor | None = None  # the same shape

    def read(self, first: int, last: int) -> Tensor:
        """Return the rows [first, last) as `StoredWeight.data`. Raises ModelError if reading fails."""
        if self._scales is None:
            self._read_small()
        codes = self._codes(first, last)
        rows = torch.arange(first, last) // self.packed.block_rows
        scales, zeros = self._scales, self._zeros
        assert scales is not None
        scales = scales[rows]
        zeros = None if zeros is None else zeros[rows]
        if self.type == "MXFP4":
            return _mxfp4_blocks(codes, scales)
        if self.type == "F16":
            return self._floats(codes, scales, zeros)
        group_of_block = torch.arange(0, codes.shape[1], _BLOCK) // self.packed.group_size
        scales = scales[:, group_of_block]
        zeros = None if zeros is None else zeros[:, group_of_block]
        return _blocks(self.type, codes, scales, zeros, self._middle)

    @property
    def _middle(self) -> int:
        """Zero point of symmetric codes: they are stored with half of their range added, except in I8."""
        return 0 if self.packed.format == "int" else 1 << (self.packed.bits - 1)

    def _floats(self, codes: Tensor, scales: Float32[Tensor, "rows groups"], zeros: Tensor | None) -> Tensor:
        packed = self.packed
        if packed.groups is not None:
            group = torch.from_numpy(bytes_of(packed.groups)).view(torch.int32).long()
        else:
            group = torch.arange(codes.shape[1]) // packed.group_size
        if packed.format == "nvfp4":
            values = torch.tensor(FP4_VALUES, dtype=torch.float32)[codes.int()] / 2
        else:
            values = codes.float()
        if packed.format == "mlx":
            assert zeros is not None
            return (values * scales[:, group] + zeros[:, group]).half()
        if packed.format not in ("fp8", "nvfp4"):
            values = values - (self._middle if zeros is None else zeros[:, group])
        found = (values * scales[:, group]).half()
        if not found.isfinite().all():
            largest = f"{(values * scales[:, group]).abs().max().item():.4g}"
            _fail(packed.codes, f"expected finite values of at most {_LARGEST_HALF:,.0f}, got one of {largest}")
        return found

    def _codes(self, first: int, last: int) -> Tensor:
        """Return the codes of rows, as bytes or in FP8's own type."""
        packed = self.packed
        if packed.format == "gptq":
            words = self._words_of_all(last - first)[:, first:last].T.contiguous()
            return _unpacked(words.view(torch.uint8), packed.bits)
        if packed.format == "awq":
            begin, end = first // 8, -(-last // 8)
            words = self._words_of_all(last - first)[:, begin:end].contiguous()
            codes = _unpacked_awq(words)[:, first - 8 * begin : last - 8 * begin]
            return codes.T.contiguous()
        row_bytes = packed.codes.num_bytes // packed.codes.shape[0]
        content = torch.from_numpy(bytes_of(packed.codes, first * row_bytes, last * row_bytes))
        content = content.reshape(last - first, row_bytes)
        if packed.format == "fp8":
            return content.view(torch.float8_e4m3fn)
        return content.view(torch.int8) if packed.format == "int" else _unpacked(content, packed.bits)

    def _words_of_all(self, num_rows: int) -> Int[Tensor, "words_of_columns words"]:
        """Return all words, and free them when as many rows as the matrix has were read."""
        words = self._words
        if words is None:
            words = torch.from_numpy(bytes_of(self.packed.codes)).view(torch.int32).reshape(self.packed.codes.shape)
        self._num_read += num_rows
        is_last = self._num_read >= self.packed.num_rows
        self._num_read = 0 if is_last else self._num_read
        self._words = None if is_last else words
        return words

    def _read_small(self) -> None:
        packed = self.packed
        scales = _floats_of(packed.scales, is_exponent=packed.format == "mxfp4")
        if packed.factor is not None:
            factor = _floats_of(packed.factor).reshape(())
            scales = scales / factor if packed.divides else scales * factor
        if packed.format in ("gptq", "awq"):
            scales = scales.reshape(packed.scales.shape).T
            self._scales = scales.contiguous()
        else:
            self._scales = scales.reshape(-(-packed.num_rows // packed.block_rows), -1)
        if packed.format != "mxfp4" and not bool(scales.abs().max() <= _LARGEST_HALF):
            _fail(packed.scales, f"expected finite scales of at most {_LARGEST_HALF:,.0f}")
        if packed.zeros is None:
            return
        zeros = self._zeros_of(packed.zeros)
        if self.type in ("Q4_0", "Q8_0") and packed.bits >= 4 and (zeros != self._middle).any():
            found = f"{zeros.min().item()} to {zeros.max().item()}"
            _fail(packed.zeros, f"expected zero points of {self._middle}, as sym in config.json says, got {found}")
        self._zeros = zeros

    def _zeros_of(self, info: TensorInfo) -> Tensor:
        packed = self.packed
        if packed.format == "mlx":
            return _floats_of(info).reshape(packed.num_rows, -1)
        content = torch.from_numpy(bytes_of(info)).reshape(info.shape[0], -1)
        if packed.format == "int":
            return content.view(torch.int8).to(torch.int16).reshape(-(-packed.num_rows // packed.block_rows), -1)
        if packed.format == "awq":
            return _unpacked_awq(content.view(torch.int32)).T.to(torch.int16)
        if packed.format == "gptq":
            stored = _unpacked(content, packed.bits).to(torch.int16)
            return ((stored + packed.zeros_lack) & ((1 << packed.bits) - 1)).T
        words = content.view(torch.int32).T.contiguous()
        return _unpacked(words.view(torch.uint8), packed.bits)[:, : packed.num_rows].T.to(torch.int16)


def _floats_of(info: TensorInfo, *, is_exponent: bool = False) -> Tensor:
    """Return the numbers of a tensor of scales as float32, or its bytes if they are exponents of MXFP4."""
    content = torch.from_numpy(bytes_of(info))
    if info.type in ("U8", "F8_E8M0"):
        return content if is_exponent else torch.ldexp(torch.ones(len(content)), content.int() - 127)
    return content.view(_DTYPES[info.type]).float()


def _unpacked(content: UInt8[Tensor, "rows bytes"], bits: int) -> UInt8[Tensor, "rows codes"]:
    """Return codes that follow each other, the lowest bits first."""
    if bits == 8:
        return content
    if bits == 3:  # codes that cross bytes
        stream = torch.from_numpy(np.unpackbits(content.numpy(), axis=1, bitorder="little"))
        low, middle, high = stream.reshape(len(content), -1, 3).unbind(2)
        return low | middle << 1 | high << 2
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8)
    return ((content[:, :, None] >> shifts) & ((1 << bits) - 1)).flatten(1)


def _unpacked_awq(words: Int[Tensor, "rows words"]) -> UInt8[Tensor, "rows codes"]:
    stored = _unpacked(words.contiguous().view(torch.uint8), 4).reshape(len(words), -1, 8)
    return stored[:, :, list(_AWQ_ORDER)].flatten(1)


def _blocks(
    type_: str, codes: Tensor, scales: Float[Tensor, "rows blocks"], zeros: Tensor | None, middle: int
) -> UInt8[Tensor, "rows bytes"]:
    """Return GGML's blocks of codes. zeros: of each block, or what Q4_1 adds."""
    num_rows, num_blocks = scales.shape
    q = codes.reshape(num_rows, num_blocks, _BLOCK)
    parts = [_half_bytes(scales)]
    if type_ == "Q4_1":
        assert zeros is not None
        parts.append(_half_bytes(zeros))
    else:
        zero = middle if zeros is None else zeros[:, :, None]
        q = q.to(torch.int16) - (zero - _OFFSETS[type_])
    if type_ == "Q5_0":
        bits = ((q >> 4) & 1).to(torch.uint8).reshape(num_rows, num_blocks, 4, 8)
        parts.append((bits << torch.arange(8, dtype=torch.uint8)).sum(3, dtype=torch.uint8))
    q = (q & 255).to(torch.uint8)
    parts.append(q if type_ == "Q8_0" else (q[:, :, :16] & 15) | (q[:, :, 16:] << 4))
    return torch.cat(parts, dim=2).reshape(num_rows, -1)


def _mxfp4_blocks(codes: Tensor, exponents: UInt8[Tensor, "rows blocks"]) -> UInt8[Tensor, "rows bytes"]:
    q = codes.reshape(*exponents.shape, _BLOCK)
    halves = q[:, :, :16] | (q[:, :, 16:] << 4)
    return torch.cat((exponents[:, :, None], halves), dim=2).reshape(len(codes), -1)


def _half_bytes(values: Float[Tensor, "rows blocks"]) -> UInt8[Tensor, "rows blocks 2"]:
    return values.half().contiguous().view(torch.uint8).reshape(*values.shape, 2)


def _fail(info: TensorInfo, problem: str) -> NoReturn:
    raise ModelFormatError(info.path, f"tensor {info.name!r:.80}", problem)
