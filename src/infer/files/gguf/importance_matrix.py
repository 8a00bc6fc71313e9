"""Importance matrices: the mean square of each input of each weight matrix, in the two formats of llama.cpp.

A GGUF file has the sums of squares `NAME.in_sum2`, `[matrices, columns]`, and the number of inputs `NAME.counts`,
`[matrices, 1]`. The older format, `.dat`, has means times a number of calls. A tensor of experts has one matrix per
expert. The names are those of tensors in GGUF files.
"""

import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NoReturn, Self, final

import numpy as np
from numpy.typing import NDArray

from infer.errors import InvalidRequestError, ModelFormatError
from infer.files.gguf.gguf import MAGIC, TypedValue, read_gguf
from infer.files.gguf.gguf_writer import TensorPlan, write_gguf
from infer.system.atomic import replacing
from infer.system.open_file import OpenFile

SUFFIX_OF_OLD_FORMAT = ".dat"
DEFAULT_CHUNK_SIZE = 512
_SUMS, _COUNTS = ".in_sum2", ".counts"
_DATASETS, _CHUNK_COUNT, _CHUNK_SIZE = "imatrix.datasets", "imatrix.chunk_count", "imatrix.chunk_size"
_INT = struct.Struct("<i")
_MAX_NAME_BYTES = 1 << 10

Means = NDArray[np.float32]  # [columns], or [experts, columns]


@final
@dataclass(frozen=True, eq=False)
class InputSquares:
    """Sums of the squares of a tensor's inputs, `[matrices, columns]`, and the number of inputs of each matrix."""

    sums: NDArray[np.float64]
    counts: NDArray[np.float64]

    @classmethod
    def zeros(cls, num_matrices: int, num_columns: int) -> Self:
        return cls(np.zeros((num_matrices, num_columns)), np.zeros(num_matrices))

    @property
    def means(self) -> Means:
        """Mean squares, `[columns]` or `[experts, columns]`. A matrix without inputs has ones, as in llama.cpp."""
        has_inputs = self.counts[:, None] > 0
        means = np.where(has_inputs, self.sums / np.maximum(self.counts[:, None], 1), 1.0).astype(np.float32)
        return means[0] if len(means) == 1 else means

    def added(self, other: "InputSquares") -> "InputSquares | None":
        """Return the sums of both, or None if their shapes differ: the old format does not divide sums by experts."""
        few, many = sorted((self, other), key=lambda each: len(each.counts))
        if few.sums.size != many.sums.size or len(few.counts) not in (1, len(many.counts)):
            return None
        return InputSquares(few.sums.reshape(many.sums.shape) + many.sums, few.counts + many.counts)


@final
@dataclass(frozen=True, eq=False)
class ImportanceMatrix:
    """Squares of the inputs over `num_chunks` chunks of `chunk_size` tokens of the datasets."""

    squares: Mapping[str, InputSquares]
    datasets: tuple[str, ...] = ()
    num_chunks: int = 0
    chunk_size: int = DEFAULT_CHUNK_SIZE

    def merged(self, other: "ImportanceMatrix") -> "ImportanceMatrix":
        """Return the sums of both, with the chunk size of this one.

        Raises InvalidRequestError if a tensor has a different number of columns in the other matrix.
        """
        squares = dict(self.squares)
        for name, theirs in other.squares.items():
            both = theirs if name not in squares else squares[name].added(theirs)
            if both is None:
                own = squares[name].sums.shape
                raise InvalidRequestError(
                    f"importance matrices of {name!r:.80} have the shapes {own} and {theirs.sums.shape}: "
                    "merge matrices of the same model"
                )
            squares[name] = both
        return ImportanceMatrix(
            squares, self.datasets + other.datasets, self.num_chunks + other.num_chunks, self.chunk_size
        )

    def write(self, path: Path) -> None:
        """Write a GGUF file, or the old format if the path ends in `.dat`. Raises OSError, with the path unchanged."""
        if path.suffix == SUFFIX_OF_OLD_FORMAT:
            with replacing(path, 0o666) as file:
                file.writelines(self._old_format())
            return
        values = {
            "general.type": TypedValue("string", "imatrix"),
            _DATASETS: TypedValue("string", list(self.datasets)),
            _CHUNK_COUNT: TypedValue("u32", self.num_chunks),
            _CHUNK_SIZE: TypedValue("u32", self.chunk_size),
        }
        write_gguf(path, values, list(self._plans()))

    def _plans(self) -> Iterator[TensorPlan]:
        for name, each in sorted(self.squares.items()):
            for suffix, numbers in ((_SUMS, each.sums), (_COUNTS, each.counts[:, None])):
                content = numbers.astype("<f4").tobytes()
                yield TensorPlan(name + suffix, "F32", numbers.shape, partial(iter, [content]))

    def _old_format(self) -> Iterator[bytes]:
        kept = {name: each for name, each in self.squares.items() if each.counts.any()}
        yield _INT.pack(len(kept))
        for name, each in sorted(kept.items()):
            num_calls = -int(-each.counts.max() // self.chunk_size)
            yield _INT.pack(len(name.encode())) + name.encode() + _INT.pack(num_calls) + _INT.pack(each.sums.size)
            yield (each.means.ravel() * np.float32(num_calls)).astype("<f4").tobytes()
        dataset = (self.datasets or ("",))[-1].encode()
        yield _INT.pack(self.num_chunks) + _INT.pack(len(dataset)) + dataset


def read_importance_matrix(path: Path) -> dict[str, Means]:
    """Return the mean squares of each tensor's inputs.

    Returns:
        Float32 by the names of tensors in GGUF files: `[columns]`, or `[experts, columns]`. A file of the old format
        does
            not have the number of experts, so all columns of all experts are in one `[columns]`.

    Raises:
        ModelError: The file cannot be read, or breaks its format.
    """
    return {name: each.means for name, each in open_importance_matrix(path).squares.items()}


def open_importance_matrix(path: Path) -> ImportanceMatrix:
    """Return the sums and counts of a file. Raises the errors of `read_importance_matrix`."""
    file = OpenFile(path, at_least=8)
    found = _read_gguf_format(path) if file.read(0, 4) == MAGIC else _OldFormat(file).read()
    if not found.squares:
        raise ModelFormatError(path, "entries", "expected the sums of at least one tensor, got none")
    for name, each in found.squares.items():
        if not (np.isfinite(each.sums).all() and np.isfinite(each.counts).all()):
            _fail(path, name, "expected finite numbers, got NaN or infinity")
        if each.sums.min() < 0 or each.counts.min() < 0:
            _fail(path, name, "expected sums and counts of at least 0, got a negative number")
    return found


def _read_gguf_format(path: Path) -> ImportanceMatrix:
    file = read_gguf(path)
    squares: dict[str, InputSquares] = {}
    names = {name.removesuffix(end) for end in (_SUMS, _COUNTS) for name in file.tensors if name.endswith(end)}
    for name in sorted(names):
        numbers = []
        for suffix in (_SUMS, _COUNTS):
            info = file.tensors.get(name + suffix)
            if info is None or info.type != "F32":
                _fail(path, name, f"expected F32 {suffix[1:]}, got {'none' if info is None else info.type}")
            numbers.append(np.frombuffer(info.file.read(info.offset, info.num_bytes), "<f4").astype(np.float64))
        sums, counts = numbers
        if len(sums) % len(counts):
            _fail(path, name, f"{len(sums)} sums cannot be divided among {len(counts)} counts")
        squares[name] = InputSquares(sums.reshape(len(counts), -1), counts)
    datasets, count, size = (file.metadata.get(key) for key in (_DATASETS, _CHUNK_COUNT, _CHUNK_SIZE))
    return ImportanceMatrix(
        squares,
        tuple(map(str, datasets)) if isinstance(datasets, list) else (),
        count if type(count) is int else 0,
        size if type(size) is int and size > 0 else DEFAULT_CHUNK_SIZE,
    )


@final
@dataclass
class _OldFormat:
    """A position that moves once through a file of the old format. Numbers are checked against the file's size."""

    file: OpenFile
    position: int = 0

    def read(self) -> ImportanceMatrix:
        squares: dict[str, InputSquares] = {}
        for _ in range(self._number("the number of entries", least=1)):
            name = self._text(self._number("the length of a name", least=1, most=_MAX_NAME_BYTES))
            num_calls, count = self._number(name), self._number(name, least=1)
            sums = np.frombuffer(self._take(4 * count), "<f4").astype(np.float64)
            # The sums are means × calls. A call was a chunk of unknown size; llama.cpp assumes its own chunk size.
            squares[name] = InputSquares(
                sums[None] * DEFAULT_CHUNK_SIZE, np.array([max(num_calls, 1) * DEFAULT_CHUNK_SIZE], np.float64)
            )
        if self.position == self.file.size:  # the rest is optional
            return ImportanceMatrix(squares)
        num_chunks = self._number("the number of chunks")
        dataset = self._text(self._number("the length of the dataset's name"))
        return ImportanceMatrix(squares, (dataset,) if dataset else (), num_chunks)

    def _number(self, where: str, *, least: int = 0, most: int = 1 << 31) -> int:
        (value,) = _INT.unpack(self._take(_INT.size))
        if not least <= value <= most:
            problem = f"{value} is not a number from {least} to {most}: this is not an importance matrix"
            _fail(self.file.path, where, problem)
        return int(value)

    def _text(self, count: int) -> str:
        return self._take(count).decode("utf-8", "replace")

    def _take(self, count: int) -> bytes:
        if count > self.file.size - self.position:
            problem = f"expected {count} bytes at byte {self.position}, got {self.file.size - self.position}"
            _fail(self.file.path, "entries", f"{problem}: this is not an importance matrix, or an incomplete one")
        self.position += count
        return self.file.read(self.position - count, count)


def _fail(path: Path, where: str, problem: str) -> NoReturn:
    raise ModelFormatError(path, f"importance of {where!r:.80}", problem)
