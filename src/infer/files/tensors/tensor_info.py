"""Location of a tensor in a file. Loads no torch: `lazy_weights` makes weights from it."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, NamedTuple, NoReturn

from infer.errors import ModelFormatError
from infer.system.open_file import AGAIN, OpenFile

# Methods of quantisation, named by the layout of a matrix's codes.
PackedFormat = Literal["gptq", "awq", "int", "pack", "fp8", "nvfp4", "mxfp4", "mlx"]


class PackedParts(NamedTuple):
    """The tensors of a quantised matrix, and the numbers needed to read them (`quantised_tensors`)."""

    format: PackedFormat
    bits: int
    num_rows: int
    num_columns: int
    group_size: int  # neighbouring columns that share a scale
    block_rows: int  # neighbouring rows that share a scale
    codes: "TensorInfo"
    scales: "TensorInfo"
    zeros: "TensorInfo | None" = None  # zero points, or MLX's biases
    zeros_lack: int = 0  # to add to the stored zero points
    groups: "TensorInfo | None" = None  # the group of each column, if columns are not ordered by group
    factor: "TensorInfo | None" = None  # one number for all scales
    divides: bool = False  # scales are divided by the factor, not multiplied

    @property
    def description(self) -> str:
        """The method with its numbers, in words."""
        order = ", columns in another order" if self.groups is not None else ""
        return f"{self.format}, {self.bits} bits, {self.block_rows} × {self.group_size} values per scale{order}"

    @property
    def tensors(self) -> "tuple[TensorInfo, ...]":
        found = self.codes, self.scales, self.zeros, self.groups, self.factor
        return tuple(info for info in found if info is not None)


@dataclass(frozen=True, eq=False)
class TensorInfo:
    """Location of a tensor in a file, its name and type there, and the changes of the format that must be undone."""

    file: OpenFile = field(repr=False)
    name: str
    type: str
    shape: tuple[int, ...]  # rows first
    offset: int  # from the start of the file
    num_bytes: int  # of the values; with a stride, other values are between them
    num_paired_heads: int = 0  # number of heads whose rows are in llama.cpp's order; 0: rows are in our order
    num_paired_rows: int = 0  # the first rows of a head, which rotate and are in that order; 0: all
    added: float = 0.0  # to add to the stored values
    row_stride: int = 0  # bytes from row to row; 0: rows are contiguous
    column_stride: int = 0  # bytes from column to column of a transposed matrix; 0: not transposed
    # Rows of the file's matrix that belong to this tensor; (): the rows at offset.
    row_ranges: tuple[tuple[int, int], ...] = ()
    scales: "TensorInfo | None" = None  # MXFP4: the scales, if they are a separate tensor; the rest is codes
    factor: "TensorInfo | None" = None  # a separate tensor: one F32 that multiplies all values
    packed: PackedParts | None = None  # a quantised matrix in several tensors; `type` is the type after reading

    @property
    def transposed(self) -> "TensorInfo":
        """The transposed matrix, for matrices of floats."""
        size = self.num_bytes // max(1, self.shape[0] * self.shape[1])
        return replace(self, shape=self.shape[::-1], row_stride=size, column_stride=self.shape[1] * size)

    def rows(self, chosen: range) -> "TensorInfo":
        """Return a tensor with some rows of this one."""
        if self.packed is not None:
            return self.gathered([(chosen.start, chosen.stop)])
        row_bytes = self.num_bytes // max(1, self.shape[0])
        stride, scales = self.row_stride or row_bytes, self.scales
        if scales is not None:  # the bytes of a row have its scales, too, which are elsewhere
            stride, scales = row_bytes - scales.num_bytes // scales.shape[0], scales.rows(chosen)
        return replace(
            self,
            shape=(len(chosen), *self.shape[1:]),
            offset=self.offset + chosen.start * stride,
            num_bytes=len(chosen) * row_bytes,
            row_stride=stride * chosen.step if self.row_stride or chosen.step > 1 else 0,
            scales=scales,
        )

    def gathered(self, ranges: Sequence[tuple[int, int]]) -> "TensorInfo":
        """Return a tensor with these ranges of this one's rows."""
        num_rows = sum(end - first for first, end in ranges)
        num_bytes = num_rows * (self.num_bytes // self.shape[0])
        return replace(self, shape=(num_rows, *self.shape[1:]), num_bytes=num_bytes, row_ranges=tuple(ranges))

    @property
    def path(self) -> Path:
        return self.file.path

    def fail(self, problem: str) -> NoReturn:
        """Raise ModelFormatError about the tensor."""
        raise ModelFormatError(self.path, f"tensor {self.name!r:.80}", problem)

    @property
    def file_bytes(self) -> int:
        """Bytes of the values in the file, in all tensors that contain a part of them."""
        if self.packed is None:
            return self.num_bytes + (0 if self.factor is None else self.factor.num_bytes)
        num_rows = self.packed.num_rows
        return sum(info.num_bytes for info in self.packed.tensors) * self.shape[0] // num_rows

    @property
    def end(self) -> int:
        return self.offset + self.num_bytes


def aligned(position: int, alignment: int) -> int:
    """Return the first multiple of the alignment that is at least the position."""
    return -(-position // alignment) * alignment


def check_layout(path: Path, tensors: Iterable[TensorInfo], start: int, size: int, alignment: int = 1) -> None:
    """Raise ModelFormatError unless tensors are contiguous from `start`, aligned, and end with a file of this size."""
    end = start
    for info in sorted(tensors, key=lambda info: (info.offset, info.end)):
        expected, problem = aligned(end, alignment), None
        if info.offset % alignment:
            problem = f"the offset is not a multiple of {alignment}"
        elif info.offset != expected:
            problem = "overlaps the tensor before it" if info.offset < expected else "leaves a hole before it"
            problem = f"{problem}: expected it at {expected - start} of the data, got {info.offset - start}"
        if problem is not None:
            raise ModelFormatError(path, f"tensor {info.name!r:.80}", problem, info.offset)
        end = info.end
    if size not in (end, aligned(end, alignment)):
        problem = "truncated" if size < end else "trailing bytes"
        problem = f"{problem}: expected {end} bytes, got {size}: {AGAIN}"
        raise ModelFormatError(path, "file size", problem, min(end, size))
