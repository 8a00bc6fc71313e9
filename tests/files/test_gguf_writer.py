"""Claims about written GGUF files: the bytes are those of the `gguf` package, and a fault leaves the old file."""

import os
from collections.abc import Iterator
from pathlib import Path

import gguf
import numpy as np
import pytest

from gguf_files import write_model
from infer.files.gguf.gguf import TypedValue, read_gguf
from infer.files.gguf.gguf_split import read_whole_gguf
from infer.files.gguf.gguf_writer import TensorPlan, write_gguf
from infer.files.tensors.tensor_info import TensorInfo


def of_every_type(writer: gguf.GGUFWriter) -> None:
    numbers = {"uint8": 255, "int8": -128, "uint16": 65535, "int16": -2, "uint32": 1 << 31, "int32": -3}
    numbers |= {"float32": 0.1, "uint64": 1 << 63, "int64": -4, "float64": 0.1, "bool": True, "string": "né"}
    for name, value in numbers.items():
        getattr(writer, f"add_{name}")(f"of.{name}", value)
        writer.add_key_value(
            f"all.{name}", [value] * 3, gguf.GGUFValueType.ARRAY, sub_type=gguf.GGUFValueType[name.upper()]
        )


def copied(info: TensorInfo) -> TensorPlan:
    def pieces() -> Iterator[bytes]:
        for start in range(0, info.num_bytes, 100):
            yield info.file.read(info.offset + start, min(100, info.num_bytes - start))

    return TensorPlan(info.name, info.type, info.shape, pieces)


@pytest.mark.parametrize("alignment", [32, 64])
def test_a_copied_file_has_the_bytes_of_the_gguf_package(tmp_path: Path, alignment: int) -> None:
    def extend(writer: gguf.GGUFWriter) -> None:
        of_every_type(writer)
        if alignment != 32:
            writer.add_custom_alignment(alignment)

    odd = {"token_embd.weight": np.ones((3, 32), np.float32), "odd": np.arange(5, dtype=np.float32)}
    source = write_model(tmp_path / "source.gguf", tensors=odd | {"b": odd["odd"]}, quantise=frozenset(odd) - {"odd"},
                         extend=extend)  # fmt: skip
    file = read_gguf(source)
    write_gguf(tmp_path / "copy.gguf", file.typed_values, [copied(info) for info in file.tensors.values()])
    assert (tmp_path / "copy.gguf").read_bytes() == source.read_bytes()


def test_parts_are_joined_with_the_types_of_the_first_one(tmp_path: Path) -> None:
    write_model(tmp_path / "m.gguf", split_tensors=4, extend=of_every_type)
    file = read_whole_gguf(tmp_path / "m-00001-of-00003.gguf")
    write_gguf(tmp_path / "copy.gguf", file.typed_values, [copied(info) for info in file.tensors.values()])
    again = read_gguf(tmp_path / "copy.gguf")
    assert (again.typed_values, list(again.tensors)) == (file.typed_values, list(file.tensors))


@pytest.mark.parametrize(("count", "error"), [(15, ValueError), (17, ValueError), (0, OSError)])
def test_a_fault_leaves_the_old_file_and_no_other(tmp_path: Path, count: int, error: type[Exception]) -> None:
    def pieces() -> Iterator[bytes]:
        yield bytes(count)
        if count == 0:
            raise OSError("the disk failed")

    path = tmp_path / "m.gguf"
    path.write_bytes(b"old")
    with pytest.raises(error):
        write_gguf(path, {"k": TypedValue("u32", 1)}, [TensorPlan("t", "F32", (2, 2), pieces)])
    assert (path.read_bytes(), list(tmp_path.iterdir())) == (b"old", [path])


def test_others_may_read_the_file_as_the_umask_says(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        write_gguf(tmp_path / "m.gguf", {}, [])
    finally:
        os.umask(before)
    assert (tmp_path / "m.gguf").stat().st_mode & 0o777 == 0o640
