"""Claims about GGUF models in several files, as the `gguf` package writes them."""

import struct
from pathlib import Path

import pytest
import torch

from gguf_files import key_value, random_tensors, raw_file, text, write_model
from infer.errors import ModelError, ModelFormatError
from infer.files import open_checkpoint
from infer.files.tensors.lazy_weights import LazyWeights
from infer.models.families import make_architecture
from infer.models.tensors import check_tensors
from refusals import check_refused


@pytest.fixture
def parts(tmp_path: Path) -> list[Path]:
    write_model(tmp_path / "m.gguf", split_tensors=4)
    return sorted(tmp_path.glob("*.gguf"))


def test_any_part_opens_the_whole_model(parts: list[Path], tmp_path: Path) -> None:
    (tmp_path / "whole").mkdir()
    whole = open_checkpoint(write_model(tmp_path / "whole" / "m.gguf"))
    assert [path.name for path in parts] == [f"m-0000{number}-of-00003.gguf" for number in (1, 2, 3)]
    found = {open_checkpoint(part).fingerprint() for part in parts}
    assert len(found) == 1
    for part in parts:
        checkpoint = open_checkpoint(part)
        assert (checkpoint.path, checkpoint.config, len(checkpoint.files)) == (parts[0], whole.config, 3)
        assert checkpoint.tensors.keys() == whole.tensors.keys()
        weights = LazyWeights(checkpoint.tensors)
        for name, weight in LazyWeights(whole.tensors).items():
            assert torch.equal(weights[name].data, weight.data)
        check_tensors(make_architecture(checkpoint.config), checkpoint.tensors)


@pytest.mark.parametrize(("missing", "named"), [(0, 1), (1, 0), (2, 1)])
def test_a_missing_part_is_named(parts: list[Path], missing: int, named: int) -> None:
    parts[missing].unlink()
    with pytest.raises(ModelError, match=f"one of 3 parts of a model: {parts[missing].name} must be in "):
        open_checkpoint(parts[named])


def test_a_part_that_lost_its_name_says_what_its_name_was(parts: list[Path]) -> None:
    for name in ("model.gguf", "m-00001-of-00002.gguf", "m-00004-of-00003.gguf"):
        other = parts[1].rename(parts[1].with_name(name))
        with pytest.raises(ModelError, match=r"-00001-of-00003\.gguf and so on: .* llama-gguf-split --merge"):
            open_checkpoint(other)
        other.rename(parts[1])


def test_parts_under_each_others_names_are_refused(parts: list[Path]) -> None:
    spare = parts[0].with_name("spare")
    parts[1].rename(spare)
    parts[2].rename(parts[1])
    spare.rename(parts[2])
    with pytest.raises(ModelFormatError, match=r"m-00002.*: split\.no: expected 1 in a part of this name, got 2"):
        open_checkpoint(parts[0])


def test_parts_of_two_models_are_refused(parts: list[Path], tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    fewer = {name: values for name, values in random_tensors("llama").items() if "ffn_norm" not in name}
    write_model(tmp_path / "other" / "m.gguf", tensors=fewer, split_tensors=4)
    (tmp_path / "other" / parts[2].name).replace(parts[2])
    with pytest.raises(ModelFormatError, match=r"split\.tensors\.count: expected 11 tensors, the parts have 10: the p"):
        open_checkpoint(parts[0])
    write_model(tmp_path / "other" / "m.gguf", split_tensors=3)
    (tmp_path / "other" / "m-00002-of-00004.gguf").replace(parts[1])
    check_refused(lambda: open_checkpoint(parts[0]), r"split\.count: expected 3 .*, got 4", ModelFormatError)


def test_a_tensor_in_two_parts_is_refused(parts: list[Path]) -> None:
    parts[2].write_bytes(parts[2].read_bytes().replace(b"blk.0.ffn_gate", b"blk.0.ffn_norm"))
    check_refused(lambda: open_checkpoint(parts[2]), "is in another part of the model, too", ModelFormatError)


@pytest.mark.parametrize(
    "count", [key_value("split.count", 8, text("3")), key_value("split.count", 5, struct.pack("<i", -1))]
)
def test_a_number_of_parts_that_is_none_is_refused(tmp_path: Path, count: bytes) -> None:
    (tmp_path / "m-00001-of-00003.gguf").write_bytes(raw_file((count,)))
    with pytest.raises(ModelFormatError, match=r"split\.count: expected a number of files, got"):
        open_checkpoint(tmp_path / "m-00001-of-00003.gguf")


def test_a_name_like_a_parts_is_no_part(tmp_path: Path) -> None:
    path = write_model(tmp_path / "m-00001-of-99999.gguf")
    assert open_checkpoint(path).path == path
