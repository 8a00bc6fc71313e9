"""Join matrices that a method quantised into several tensors of a folder. Loads no torch.

K is the number of columns, N the number of rows, g the columns per scale. Codes of `bits` bits are contiguous in words
of 32 bits, the lowest bits first.

    format  codes                                    scales               zero points           value
    gptq    qweight I32 [K·bits/32, N]               scales [K/g, N]      qzeros, along N       (q − z) s of g_idx
    awq     qweight I32 [K, N/8], in another order   scales [K/g, N]      qzeros, as qweight    (q − z) s
    pack    weight_packed I32 [N, K·bits/32]         weight_scale [N, K/g]  weight_zero_point, along N
    int     weight I8 [N, K]                         weight_scale [N, K/g]  weight_zero_point   (q − z) s
    fp8     weight e4m3 [N, K]                       weight_scale_inv or weight_scale           w s
    nvfp4   weight_packed or weight U8 [N, K/2]      weight_scale e4m3 [N, K/16]                e2m1 s ÷ or × a factor
    mxfp4   weight_packed U8 [N, K/2]                weight_scale U8 [N, K/32]                  e2m1 2^(s − 127)
    mlx     weight U32 [N, K·bits/32]                scales [N, K/g]      biases [N, K/g]       q s + b

Scales of fp8 are one number, one per row, or one per block of rows and columns.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from math import prod

from infer.compute.quantization.ggml_types import BLOCK_TYPES
from infer.files.tensors.quantisation_config import MOST_COLUMNS, Quantisation
from infer.files.tensors.tensor_info import PackedFormat, PackedParts, TensorInfo
from infer.files.tensors.tensor_names import is_skipped

_FLOATS = ("F16", "BF16", "F32")
_BYTE_SCALES = ("U8", "F8_E8M0")  # powers of two
# Scales of activations and of cached keys and values. Activations and the cache are not quantised by the file's method.
_UNUSED = frozenset({
    "input_scale", "output_scale", "activation_scale", "input_global_scale", "input_zero_point", "output_zero_point",
    "q_scale", "k_scale", "v_scale", "prob_scale", "q_zero_point", "k_zero_point", "v_zero_point",
})  # fmt: skip
_COMPANIONS = frozenset({
    "qzeros", "g_idx", "weight_scale", "weight_scale_inv", "weight_zero_point", "weight_global_scale",
    "weight_scale_2", "weight_g_idx", "weight_shape",
})  # fmt: skip
_BLOCK = 32  # columns per scale in the blocks of the kernels

Parts = dict[str, TensorInfo]  # the tensors of a module, by the last parts of their names


def with_joined_matrices(stored: Mapping[str, TensorInfo], quantisation: Quantisation) -> dict[str, TensorInfo]:
    """Return the tensors with one tensor per quantised matrix, its module's `weight`, and no scales of activations.

    Raises ModelFormatError if a matrix lacks a tensor, or if shapes and the config disagree.
    """
    modules = dict[str, Parts]()
    for name, info in stored.items():
        if not is_skipped(name):
            module, _, kind = name.rpartition(".")
            modules.setdefault(module, {})[kind] = info
    found = dict[str, TensorInfo]()
    for module, parts in modules.items():
        joined = _joined(module, parts, quantisation)
        found |= {f"{module}.{kind}" if module else kind: info for kind, info in joined.items()}
    return _without_empty_biases(found) if quantisation.method == "gptq" else found


def _without_empty_biases(tensors: dict[str, TensorInfo]) -> dict[str, TensorInfo]:
    """Return the tensors without the biases that GPTQ tools write for matrices of models without biases.

    Such biases are zero in all layers. A bias of the model itself is not.
    """
    biases = dict[str, list[str]]()  # by the last part of their modules' names
    for name in tensors:
        module, _, kind = name.rpartition(".")
        weight = tensors.get(f"{module}.weight")
        if kind == "bias" and weight is not None and weight.packed is not None:
            biases.setdefault(module.rpartition(".")[2], []).append(name)
    empty = {name for names in biases.values() if all(_is_zero(tensors[name]) for name in names) for name in names}
    return {name: info for name, info in tensors.items() if name not in empty}


def _is_zero(info: TensorInfo) -> bool:
    return not any(info.file.read(info.offset, info.num_bytes))


def _joined(module: str, parts: Parts, quantisation: Quantisation) -> Parts:
    """Return a module's tensors with its quantised matrix, if it has one, as `weight`."""
    codes = next((parts[kind] for kind in ("qweight", "weight_packed", "weight") if kind in parts), None)
    if codes is None or not _are_codes(codes, parts):
        for kind, info in parts.items():
            if kind in _COMPANIONS:
                got = "none" if codes is None else f"{codes.name!r:.80} of {codes.type}"
                info.fail(f"expected a tensor of quantised codes next to it, got {got}")
        return {kind: info for kind, info in parts.items() if kind not in _UNUSED}
    matrix = _Matrix(module, parts, quantisation)
    packed = matrix.read(codes)
    if "weight" in parts and parts["weight"] is not codes:
        codes.fail(f"is the same weight as {parts['weight'].name!r:.80}")
    type_, shape = _loaded_type(packed, quantisation), (packed.num_rows, packed.num_columns)
    num_bytes = packed.num_rows * BLOCK_TYPES[type_].row_bytes(packed.num_columns)
    info = replace(codes, type=type_, shape=shape, num_bytes=num_bytes, packed=packed)
    return {"weight": info} | {kind: info for kind, info in parts.items() if kind not in matrix.used | _UNUSED}


def _are_codes(info: TensorInfo, parts: Parts) -> bool:
    """Return True if a tensor has codes of a quantised matrix. Other tensors are floats, or of a refused type."""
    if "qweight" in parts or "weight_packed" in parts:
        return True
    return info.type in ("F8_E4M3", "I8") or (info.type in ("U8", "U32") and len(parts) > 1)


class _Matrix:
    """The tensors of one quantised matrix. Each tensor that is read is noted in `used`."""

    def __init__(self, module: str, parts: Parts, quantisation: Quantisation) -> None:
        self.module, self.parts, self.quantisation = module, parts, quantisation
        self.used = set[str]()

    def read(self, codes: TensorInfo) -> PackedParts:
        """Return the parts of the matrix, by the name and the type of the codes."""
        self.used |= {kind for kind, info in self.parts.items() if info is codes}
        if len(codes.shape) != 2 or not prod(codes.shape):
            codes.fail(f"expected codes of a matrix, got the shape {codes.shape}")
        if "qweight" in self.parts:
            return self._of_columns(codes)
        if "weight_packed" in self.parts:
            return self._words_in_rows(codes) if codes.type == "I32" else self._pairs(codes)
        readers = {"F8_E4M3": self._bytes, "I8": self._bytes, "U8": self._pairs, "U32": self._mlx}
        return readers[codes.type](codes)

    def _of_columns(self, codes: TensorInfo) -> PackedParts:
        """Read GPTQ's and AWQ's format, whose words are in the order of columns."""
        method = self.quantisation.method
        if method not in ("gptq", "awq"):
            codes.fail("expected quant_method gptq or awq in config.json's quantization_config, got none of them")
        _check_type(codes, "I32")
        is_awq, scales, zeros = method == "awq", self._part("scales"), self._part("qzeros", "I32")
        index = self._maybe("g_idx", "I32")
        size = self.quantisation.one_size()
        bits = size[0] if size else codes.shape[0] * 32 // prod(index.shape) if index and prod(index.shape) else 0
        if bits not in (2, 3, 4, 8):
            codes.fail(f"expected codes of 2, 3, 4 or 8 bits for its g_idx, got the shape {codes.shape}")
        num_rows = codes.shape[1] * (32 // bits if is_awq else 1)
        num_columns = codes.shape[0] if is_awq else codes.shape[0] * 32 // bits
        group_size = size[1] if size else -(-num_columns // max(1, scales.shape[0] if scales.shape else 1))
        group_size = group_size or num_columns
        num_groups = -(-num_columns // group_size)
        _check_shape(scales, (num_groups, num_rows), f"{group_size} columns per scale")
        if num_rows * bits % 32:
            codes.fail(f"expected rows that fill words of zero points, got {num_rows} rows of {bits} bits")
        _check_shape(zeros, (num_groups, num_rows * bits // 32), f"{bits} bits")
        format_: PackedFormat = "awq" if is_awq else "gptq"
        lacks = self.quantisation.zeros_lack
        index = _out_of_order(index, num_columns, group_size, num_groups)
        return PackedParts(format_, bits, num_rows, num_columns, group_size, 1, codes, scales, zeros, lacks, index)

    def _words_in_rows(self, codes: TensorInfo) -> PackedParts:
        """Read integers of compressed-tensors, packed along rows."""
        num_rows, scales = codes.shape[0], self._part("weight_scale")
        shape, sizes = self._maybe("weight_shape"), self.quantisation.sizes
        if shape is not None:
            num_columns = _stored_shape(shape, num_rows)
            bits = codes.shape[1] * 32 // num_columns
        else:
            if len({bits for bits, _ in sizes}) != 1:
                codes.fail("expected a tensor weight_shape next to it, or one number of bits in config.json")
            bits = next(iter(sizes))[0]
            num_columns = codes.shape[1] * 32 // bits
        if bits not in (2, 4, 8) or codes.shape[1] != -(-num_columns * bits // 32):
            codes.fail(f"expected 2, 4 or 8 bits for each of {num_columns} columns, got the shape {codes.shape}")
        zeros, index = self._maybe("weight_zero_point", "I32"), self._maybe("weight_g_idx", "I32")
        block_rows, group_size = self._grid(scales, num_rows, num_columns, bits)
        num_groups = -(-num_columns // group_size)
        if zeros is not None:
            _check_shape(zeros, (-(-num_rows * bits // 32), num_groups), f"{bits} bits")
        index = _out_of_order(index, num_columns, group_size, num_groups)
        grid = bits, num_rows, num_columns, group_size, block_rows
        return PackedParts("pack", *grid, codes, scales, zeros, 0, index)

    def _bytes(self, codes: TensorInfo) -> PackedParts:
        """Read FP8, and integers of 8 bits that are not packed."""
        num_rows, num_columns = codes.shape
        name = next((name for name in ("weight_scale_inv", "weight_scale", "scale") if name in self.parts), None)
        if name is None:
            codes.fail("expected a tensor of scales next to it, weight_scale_inv or weight_scale")
        is_float = codes.type == "F8_E4M3"
        scales = self._part(name, *_FLOATS, *(_BYTE_SCALES if is_float else ()))
        zeros = None if is_float else self._maybe("weight_zero_point", "I8")
        block_rows, group_size = self._grid(scales, num_rows, num_columns, 0 if is_float else 8)
        if zeros is not None:
            _check_shape(zeros, (-(-num_rows // block_rows), -(-num_columns // group_size)), "its scales")
        grid = 8, num_rows, num_columns, group_size, block_rows
        return PackedParts("fp8" if is_float else "int", *grid, codes, scales, zeros)

    def _pairs(self, codes: TensorInfo) -> PackedParts:
        """Read NVFP4 and MXFP4, with two codes per byte."""
        _check_type(codes, "U8")
        num_rows, num_columns = codes.shape[0], 2 * codes.shape[1]
        scales = self._part("weight_scale", "F8_E4M3", *_BYTE_SCALES)
        is_mx = scales.type in _BYTE_SCALES
        group_size = 32 if is_mx else 16
        if num_columns % group_size:
            codes.fail(f"expected a multiple of {group_size} columns, got {num_columns}")
        _check_shape(scales, (num_rows, num_columns // group_size), f"{group_size} columns per scale")
        if is_mx:
            return PackedParts("mxfp4", 4, num_rows, num_columns, group_size, 1, codes, scales)
        divides = "weight_global_scale" in self.parts
        factor = self._part("weight_global_scale" if divides else "weight_scale_2")
        _check_shape(factor, (1,), "a matrix")
        grid = 4, num_rows, num_columns, group_size, 1
        return PackedParts("nvfp4", *grid, codes, scales, factor=factor, divides=divides)

    def _mlx(self, codes: TensorInfo) -> PackedParts:
        size = (self.quantisation.sizes_by_module or {}).get(self.module) or self.quantisation.one_size()
        if self.quantisation.method != "mlx" or size is None:
            codes.fail("expected MLX's object quantization with bits and group_size in config.json, got none")
        bits, group_size = size
        num_rows, num_columns = codes.shape[0], codes.shape[1] * 32 // bits
        scales, biases = self._part("scales"), self._part("biases")
        shape = num_rows, -(-num_columns // (group_size or num_columns))
        for each in (scales, biases):
            _check_shape(each, shape, f"{group_size} columns per scale")
        return PackedParts("mlx", bits, num_rows, num_columns, group_size or num_columns, 1, codes, scales, biases)

    def _grid(self, scales: TensorInfo, num_rows: int, num_columns: int, bits: int) -> tuple[int, int]:
        """Return the number of rows and of columns that share a scale.

        For integers of `bits` bits the config has the size of a group. If `bits` is 0, the matrix is FP8.
        """
        shape, block = scales.shape, self.quantisation.block
        if prod(shape) == 1:
            return num_rows, num_columns
        if shape in ((num_rows,), (num_rows, 1)):
            return 1, num_columns
        if not bits:
            expected = -(-num_rows // block[0]), -(-num_columns // block[1])
            if shape != expected:
                scales.fail(
                    f"expected one scale, one per row, or one per block of {block[0]} rows and {block[1]} columns "
                    f"{expected}, got the shape {shape}",
                )
            return block
        if len(shape) != 2 or shape[0] != num_rows or not shape[1] or num_columns % shape[1]:
            scales.fail(f"expected scales that divide {num_columns} columns equally, got the shape {shape}")
        size, sizes = (bits, num_columns // shape[1]), self.quantisation.sizes
        if sizes and size not in sizes:
            known = " or ".join(f"{group or num_columns} columns of {of} bits" for of, group in sorted(sizes))
            scales.fail(f"expected a scale for {known}, as in config.json, got {size[1]} columns of {bits} bits")
        return 1, size[1]

    def _part(self, kind: str, *types: str) -> TensorInfo:
        """Return a tensor that the matrix needs. Raises ModelFormatError if it is missing or has another type."""
        found = self._maybe(kind, *(types or _FLOATS))
        if found is None:
            codes = next(info for name, info in self.parts.items() if name in self.used)
            codes.fail(f"expected a tensor {kind} next to it")
        return found

    def _maybe(self, kind: str, *types: str) -> TensorInfo | None:
        found = self.parts.get(kind)
        if found is not None:
            self.used.add(kind)
            _check_type(found, *types)
        return found


def _loaded_type(packed: PackedParts, quantisation: Quantisation) -> str:
    """Return the type for the matrix: a type of the kernels that represents it exactly, otherwise F16."""
    num_columns, group_size = packed.num_columns, packed.group_size
    if packed.format == "fp8":
        size = BLOCK_TYPES["F8_E4M3"].block_size
        has_whole_blocks = num_columns % size == 0 and (group_size % size == 0 or group_size == num_columns)
        return "F8_E4M3" if has_whole_blocks else "F16"
    if packed.format == "nvfp4":
        return "F16" if num_columns % BLOCK_TYPES["NVFP4_SCALED"].block_size else "NVFP4_SCALED"
    if num_columns % _BLOCK or (group_size % _BLOCK and group_size < num_columns) or packed.groups is not None:
        return "F16"
    if packed.format == "mxfp4":
        return "MXFP4"
    if packed.format == "mlx":
        return "Q4_1" if packed.bits <= 4 else "F16"
    is_symmetric = packed.zeros is None or (packed.format == "gptq" and quantisation.is_symmetric)
    if packed.bits == 8:
        return "Q8_0" if is_symmetric else "F16"
    return "Q4_0" if is_symmetric or packed.bits < 4 else "Q5_0"  # q − z has one bit more than q


def _out_of_order(index: TensorInfo | None, num_columns: int, group_size: int, num_groups: int) -> TensorInfo | None:
    """Return the tensor with the group of each column, or None if columns are ordered by group."""
    if index is None:
        return None
    _check_shape(index, (num_columns,), f"{num_columns} columns")
    stored = index.file.read(index.offset, index.num_bytes)
    if stored == _in_order(num_columns, group_size):
        return None
    groups = memoryview(stored).cast("i")
    if min(groups) < 0 or max(groups) >= num_groups:
        index.fail(f"expected groups from 0 to {num_groups - 1}, got {min(groups)} to {max(groups)}")
    return index


@lru_cache(8)
def _in_order(num_columns: int, group_size: int) -> bytes:
    return b"".join((column // group_size).to_bytes(4, "little") for column in range(num_columns))


def _stored_shape(info: TensorInfo, num_rows: int) -> int:
    """Return the number of columns in a tensor weight_shape, which must have this number of rows."""
    if info.type not in ("I64", "I32") or prod(info.shape) != 2:
        info.fail(f"expected two integers (I64 or I32), got {info.type} of the shape {info.shape}")
    rows, columns = memoryview(info.file.read(info.offset, info.num_bytes)).cast("q" if info.type == "I64" else "i")
    if rows != num_rows or not 0 < columns <= MOST_COLUMNS:
        info.fail(f"expected {num_rows} rows and columns up to {MOST_COLUMNS}, got {rows} and {columns}")
    return columns


def _check_type(info: TensorInfo, *types: str) -> None:
    if types and info.type not in types:
        info.fail(f"expected {' or '.join(types)}, got {info.type}")


def _check_shape(info: TensorInfo, shape: tuple[int, ...], reason: str) -> None:
    """Raise ModelFormatError for another shape. Axes of length one are ignored."""
    if [size for size in info.shape if size != 1] != [size for size in shape if size != 1]:
        info.fail(f"expected the shape {shape} for {reason}, got {info.shape}")
