"""Location of a tensor in a file. Loads no torch: `lazy_weights` makes weights of it."""

from dataclasses import dataclass, field
from pathlib import Path

from infer.system.open_file import OpenFile


@dataclass(frozen=True, eq=False)
class TensorInfo:
    """Location of a tensor under its file's name and in its file's type, and the changes that must be undone."""

    file: OpenFile = field(repr=False)
    name: str
    type: str
    shape: tuple[int, ...]  # rows first
    offset: int  # from the start of the file
    num_bytes: int  # of the values; with a stride, others lie between them
    num_paired_heads: int = 0  # so many heads' rows are in llama.cpp's order; 0: the rows are as they should be
    added: float = 0.0  # what the stored values lack
    row_stride: int = 0  # bytes from row to row; 0: each follows the one before
    column_stride: int = 0  # bytes from column to column, if the file has the transposed matrix; 0: as usual
    row_ranges: tuple[tuple[int, int], ...] = ()  # rows of the file's matrix that are this one's; (): those at offset
    scales: "TensorInfo | None" = None  # of MXFP4, if the scales are a tensor of their own; the rest is codes

    @property
    def path(self) -> Path:
        return self.file.path

    @property
    def end(self) -> int:
        return self.offset + self.num_bytes
