"""Rows of a quantised matrix of a folder (`quantised_tensors`), read as blocks of a type that kernels support.

    Q4_0 (q − 8) s   Q5_0 (q − 16) s   Q8_0 q s   Q4_1 q s + m   MXFP4   NVFP4_SCALED   F8_E4M3 w s   F16

Integers are moved, and never rounded. A code minus its zero point has 5 bits, so codes of 4 bits with zero points
become Q5_0, whose numbers equal those of the file. A scale becomes f16: unchanged if the file has f16, or bf16 from
2⁻¹⁷ on; otherwise it is rounded once. Scales of FP8, and the factor of an NVFP4 matrix or its reciprocal, are f32.
Matrices that no block can represent become F16: each number is computed in float32, then rounded.
"""

from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from infer.compute.quantization.ggml_types import BLOCK_TYPES, E4M3_VALUES, FP4_VALUES
from infer.files.tensors.tensor_bytes import DTYPES, bytes_of
from infer.files.tensors.tensor_info import PackedParts, TensorInfo

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]
Codes = NDArray[np.uint8]  # signed in the format "int"

# Place of each of eight neighbouring codes, as the number of a nibble in the word.
_AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
_BLOCK = 32
_LARGEST_HALF = 65504.0
_NO_EXPONENT = 255  # NaN in E8M0
_LEAST_BAD_SCALE = 0x7F  # in E4M3: NaN, and from 128 on negative numbers
_VALUES_AT_ONCE = 1 << 17  # so many that temporary arrays fit a core's cache
_OFFSETS = {"Q4_0": 8, "Q5_0": 16, "Q8_0": 0}  # offsets of the codes in blocks
_FP8: Floats = np.array(E4M3_VALUES, np.float32)
_FP4: Floats = np.array(FP4_VALUES, np.float32) * np.float32(0.5)


@final
class QuantisedRows:
    """Reads rows of one quantised matrix. Scales and zero points are kept after the first read.

    Codes that the file stores in the order of columns are also kept, until each row has been read once.
    """

    def __init__(self, info: TensorInfo, packed: PackedParts) -> None:
        self.type, self.num_columns, self.packed = info.type, info.shape[1], packed
        self._words: NDArray[np.uint32] | None = None  # codes of GPTQ and AWQ
        self._num_read = 0
        self._scales: NDArray[Any] | None = None  # [groups of rows, groups of columns]
        self._zeros: NDArray[Any] | None = None  # the same shape
        self._factor = np.ones(1, np.float32)  # factor of NVFP4_SCALED

    def read(self, first: int, last: int) -> Tensor:
        """Return the rows [first, last) as `StoredWeight.data`. Raises ModelError if reading fails."""
        if self._scales is None:
            self._read_small()
        step = max(1, _VALUES_AT_ONCE // self.num_columns)
        kept = -(-step // 8) * 8  # whole words of AWQ
        starts = range(first, last, kept) or [first]
        return torch.from_numpy(np.concatenate([self._rows(start, min(start + kept, last)) for start in starts]))

    def _rows(self, first: int, last: int) -> NDArray[Any]:
        assert self._scales is not None
        codes, rows = self._codes(first, last), np.arange(first, last) // self.packed.block_rows
        scales, zeros = self._scales[rows], None if self._zeros is None else self._zeros[rows]
        if self.type == "MXFP4":
            return mxfp4_blocks(codes, scales)
        if self.type == "NVFP4_SCALED":
            return _nvfp4_blocks(codes, scales, self._factor)
        if self.type == "F16":
            return self._halves(codes, scales, zeros)
        group_of_block = np.arange(0, self.num_columns, BLOCK_TYPES[self.type].block_size) // self.packed.group_size
        if self.type == "F8_E4M3":
            if (codes & 0x7F).max() == 0x7F:
                self.packed.codes.fail("expected numbers, got NaN")
            return _fp8_blocks(codes, scales[:, group_of_block])
        scales = scales[:, group_of_block].astype(np.float16)
        return _blocks(self.type, codes, scales, None if zeros is None else zeros[:, group_of_block], self._middle)

    @property
    def _middle(self) -> int:
        """Zero point of symmetric codes. They are stored with half of their range added, except in I8."""
        return 0 if self.packed.format == "int" else 1 << (self.packed.bits - 1)

    def _halves(self, codes: Codes, scales: Floats, zeros: NDArray[Any] | None) -> NDArray[np.float16]:
        packed = self.packed
        if packed.format in ("fp8", "nvfp4"):
            values: Floats = (_FP8 if packed.format == "fp8" else _FP4)[codes]
        else:
            values = (codes.view(np.int8) if packed.format == "int" else codes).astype(np.float32)
            if packed.format != "mlx":
                values -= self._middle if zeros is None else self._of_columns(zeros.astype(np.float32))
        with np.errstate(over="ignore", invalid="ignore"):  # checked below
            values *= self._of_columns(scales)
            if packed.format == "mlx":
                assert zeros is not None
                values += self._of_columns(zeros)
            found = values.astype(np.float16)
        if not np.isfinite(found).all():
            largest = f"{np.abs(values).max():.4g}"
            packed.codes.fail(f"expected finite values of at most {_LARGEST_HALF:,.0f}, got {largest}")
        return found

    def _of_columns(self, numbers: Floats) -> Floats:
        """Return the number of each column, from the numbers of groups."""
        if self.packed.groups is not None:
            return numbers[:, bytes_of(self.packed.groups).view(np.int32)]
        return np.repeat(numbers, self.packed.group_size, axis=1)[:, : self.num_columns]

    def _codes(self, first: int, last: int) -> Codes:
        """Return the codes of rows, one byte each."""
        packed = self.packed
        if packed.format == "gptq":
            words = np.ascontiguousarray(self._words_of_all(last - first)[:, first:last].T)
            return unpacked(words.view(np.uint8), packed.bits)[:, : self.num_columns]
        if packed.format == "awq":
            begin, end = first // 8, -(-last // 8)
            codes = _unpacked_awq(self._words_of_all(last - first)[:, begin:end])
            return codes[first - 8 * begin : last - 8 * begin]
        row_bytes = packed.codes.num_bytes // packed.num_rows
        content = bytes_of(packed.codes, first * row_bytes, last * row_bytes).reshape(last - first, row_bytes)
        return unpacked(content, packed.bits)[:, : self.num_columns]

    def _words_of_all(self, num_rows: int) -> NDArray[np.uint32]:
        """Return all words. Free them after as many rows as the matrix has were read."""
        words = self._words
        if words is None:
            words = bytes_of(self.packed.codes).view(np.uint32).reshape(self.packed.codes.shape)
        self._num_read += num_rows
        is_last = self._num_read >= self.packed.num_rows
        self._num_read = 0 if is_last else self._num_read
        self._words = None if is_last else words
        return words

    def _read_small(self) -> None:
        """Read the scales, the zero points and the factor, and check them."""
        packed, num_groups = self.packed, -(-self.packed.num_rows // self.packed.block_rows)
        if packed.format == "mxfp4":
            self._scales = bytes_of(packed.scales).reshape(num_groups, -1)
            if self._scales.max() == _NO_EXPONENT:
                packed.scales.fail(
                    f"expected exponents up to {_NO_EXPONENT - 1}, got {_NO_EXPONENT}, which is not a number",
                )
            return
        if self.type == "NVFP4_SCALED":
            codes = bytes_of(packed.scales).reshape(num_groups, -1)
            if codes.max() >= _LEAST_BAD_SCALE:
                packed.scales.fail("expected scales from 0 to 448, got NaN or a negative number")
            self._scales, self._factor = codes, self._nvfp4_factor()
            return
        scales = _floats_of(packed.scales)
        if packed.factor is not None:
            factor = _floats_of(packed.factor)
            with np.errstate(all="ignore"):  # checked below
                scales = scales / factor if packed.divides else scales * factor
        if packed.format in ("gptq", "awq"):
            scales = scales.reshape(-1, packed.num_rows).T
        scales = scales.reshape(num_groups, -1)
        _check_halves(packed.scales, scales, "scales")
        if packed.zeros is not None:
            self._zeros = self._zeros_of(packed.zeros).reshape(scales.shape)
        if self._zeros is not None and self.type in ("Q4_0", "Q8_0") and packed.bits >= 4:
            low, high = int(self._zeros.min()), int(self._zeros.max())
            if (low, high) != (self._middle, self._middle):
                problem = f"expected zero points of {self._middle}, because of sym in config.json, got {low} to {high}"
                (packed.zeros or packed.scales).fail(problem)
        self._scales = scales

    def _nvfp4_factor(self) -> Floats:
        """Return the number that multiplies all values of NVFP4."""
        packed = self.packed
        assert packed.factor is not None
        factor = _floats_of(packed.factor)
        with np.errstate(all="ignore"):  # checked below
            factor = np.float32(1) / factor if packed.divides else factor
        if not np.isfinite(factor).all():
            packed.factor.fail(f"expected a {'number that is not 0' if packed.divides else 'finite number'}")
        return factor

    def _zeros_of(self, info: TensorInfo) -> NDArray[Any]:
        """Return the zero points as integers, or MLX's biases as floats."""
        packed = self.packed
        if packed.format == "mlx":
            return _check_halves(info, _floats_of(info), "biases")
        content = bytes_of(info)
        if packed.format == "int":
            return content.view(np.int8)
        words = content.view(np.uint32).reshape(info.shape[0], -1)
        if packed.format == "awq":
            return _unpacked_awq(words)
        if packed.format == "gptq":
            stored = unpacked(words.view(np.uint8), packed.bits)
            return ((stored + packed.zeros_lack) & ((1 << packed.bits) - 1)).T
        return unpacked(np.ascontiguousarray(words.T).view(np.uint8), packed.bits)[:, : packed.num_rows].T


def _check_halves(info: TensorInfo, numbers: Floats, name: str) -> Floats:
    """Return numbers that f16 can represent. Raises ModelFormatError for others."""
    if not np.abs(numbers).max() <= _LARGEST_HALF:  # false for NaN
        info.fail(f"expected finite {name} of at most {_LARGEST_HALF:,.0f}")
    return numbers


def _floats_of(info: TensorInfo) -> Floats:
    """Return the numbers of a tensor of scales. Bytes are exponents of two."""
    content = bytes_of(info)
    if info.type in ("U8", "F8_E8M0"):
        with np.errstate(over="ignore"):  # the largest exponent means NaN
            return np.ldexp(np.float32(1), content.astype(np.int32) - 127)
    return torch.from_numpy(content).view(DTYPES[info.type]).float().numpy()


def unpacked(content: Bytes, bits: int) -> Codes:
    """Return rows of codes that are contiguous in the rows of bytes, the lowest bits first."""
    if bits == 3:  # codes that cross bytes
        stream = np.unpackbits(content, axis=1, bitorder="little").reshape(len(content), -1, 3)
        codes: Codes = stream[:, :, 0] | stream[:, :, 1] << np.uint8(1) | stream[:, :, 2] << np.uint8(2)
        return codes
    for width in (4, 2):
        if bits <= width:
            wide = content.astype(np.uint16)
            mask = np.uint16(((1 << width) - 1) * 0x0101)
            content = ((wide | wide << np.uint16(8 - width)) & mask).view(np.uint8)  # the lower half comes first
    return content


def _unpacked_awq(words: NDArray[np.uint32]) -> Codes:
    """Return the codes of words, transposed: one row for each of the eight codes in the words of a row."""
    columns = np.ascontiguousarray(words.T)
    codes = np.empty((len(columns), 8, columns.shape[1]), np.uint8)
    for index, place in enumerate(_AWQ_PLACES):
        codes[:, index] = (columns >> np.uint32(4 * place)) & np.uint32(15)
    return codes.reshape(-1, columns.shape[1])


def _blocks(
    type_: str, codes: Codes, scales: NDArray[np.float16], zeros: NDArray[Any] | None, middle: int
) -> NDArray[np.uint8]:
    """Return GGML's blocks of codes. `zeros` are the zero points of blocks, or the numbers that Q4_1 adds."""
    blocks = np.empty((*scales.shape, BLOCK_TYPES[type_].block_bytes), np.uint8)
    q = codes.reshape(*scales.shape, _BLOCK)
    blocks[:, :, :2] = _half_bytes(scales)
    at = 2
    if type_ == "Q4_1":
        assert zeros is not None
        blocks[:, :, 2:4] = _half_bytes(zeros.astype(np.float16))
        at = 4
    elif zeros is not None:
        q = q - (zeros.astype(np.int16) - _OFFSETS[type_]).astype(np.uint8)[:, :, None]  # modulo 256
    elif middle != _OFFSETS[type_]:
        q = q - np.uint8((middle - _OFFSETS[type_]) & 255)
    if type_ == "Q5_0":
        blocks[:, :, 2:6] = np.packbits(q >> 4, axis=2, bitorder="little")
        at = 6
    blocks[:, :, at:] = q if type_ == "Q8_0" else (q[:, :, :16] & 15) | (q[:, :, 16:] << 4)
    return blocks.reshape(len(codes), -1)


def mxfp4_blocks(codes: Codes, exponents: Bytes) -> NDArray[np.uint8]:
    """Return GGML's blocks: the exponent, then codes whose low halves are the first 16 values."""
    q = codes.reshape(*exponents.shape, _BLOCK)
    halves = q[:, :, :16] | (q[:, :, 16:] << 4)
    return np.concatenate((exponents[:, :, None], halves), axis=2).reshape(len(codes), -1)


def _nvfp4_blocks(codes: Codes, scales: Bytes, factor: Floats) -> NDArray[np.uint8]:
    """Return GGML's blocks of NVFP4, with the factor after each row."""
    q = codes.reshape(len(codes), -1, 4, 16)
    pairs = (q[..., :8] | (q[..., 8:] << 4)).reshape(len(codes), -1, 32)
    rows = np.concatenate((scales.reshape(len(codes), -1, 4), pairs), axis=2).reshape(len(codes), -1)
    tails = np.broadcast_to(factor.reshape(-1).view(np.uint8), (len(codes), 4))
    return np.concatenate((rows, tails), axis=1)


def _fp8_blocks(codes: Codes, scales: Floats) -> NDArray[np.uint8]:
    in_bytes = np.ascontiguousarray(scales, np.float32).view(np.uint8).reshape(*scales.shape, 4)
    return np.concatenate((in_bytes, codes.reshape(*scales.shape, -1)), axis=2).reshape(len(codes), -1)


def _half_bytes(values: NDArray[np.float16]) -> NDArray[np.uint8]:
    return np.ascontiguousarray(values).view(np.uint8).reshape(*values.shape, 2)
