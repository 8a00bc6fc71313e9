"""Claims about folders of safetensors: values are those that the package wrote, and broken folders are refused."""

import json
import os
import re
import shutil
import struct
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save, save_file
from torch import Tensor

from infer.errors import ModelError, ModelFormatError, UnsupportedModelError
from infer.files import open_checkpoint
from infer.files.tensors.lazy_weights import LazyWeights, read_weight
from infer.files.tensors.safetensors import read_safetensors
from processor_time import least_processor_seconds
from refusals import check_refused, refusal

FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
CONFIG = {"model_type": "llama", "hidden_size": 8}


def make_folder(folder: Path, tensors: Mapping[str, Tensor], config: Mapping[str, Any] = CONFIG) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(dict(tensors), folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def make_shards(folder: Path) -> dict[str, Tensor]:
    """Return a folder of two shards, and their tensors."""
    tensors = {"model.embed_tokens.weight": torch.randn(6, 4), "lm_head.weight": torch.randn(6, 4)}
    shards = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    for shard, (name, tensor) in zip(shards, tensors.items(), strict=True):
        save_file({name: tensor}, folder / shard)
    write_index(folder, dict(zip(tensors, shards, strict=True)))
    return tensors


def write_index(folder: Path, weight_map: Any) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def raw_file(header: str | bytes | Mapping[str, Any], data: bytes = b"", length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else (header if isinstance(header, str) else json.dumps(header)).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def entry(dtype: Any = "F32", shape: Any = (2,), offsets: Any = (0, 8)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


@pytest.mark.parametrize("name", FLOATS)
def test_every_float_type_is_the_files_bytes(tmp_path: Path, name: str) -> None:
    expected = torch.randn(5, 3).to(FLOATS[name])
    weight = LazyWeights(open_checkpoint(make_folder(tmp_path, {"lm_head.weight": expected})).tensors)["lm_head.weight"]
    assert (weight.type, weight.shape) == (name, (5, 3))
    assert torch.equal(weight.data, expected)


def test_tensors_are_copies_and_cannot_change_the_file(tmp_path: Path) -> None:
    path = make_folder(tmp_path, {"lm_head.weight": torch.randn(5, 3)}) / "model.safetensors"
    before = path.read_bytes()
    weights = LazyWeights(open_checkpoint(tmp_path).tensors)
    first, second = weights["lm_head.weight"].data, weights["lm_head.weight"].data
    first.zero_()
    assert second.count_nonzero() > 0
    assert path.read_bytes() == before


def test_a_tensor_that_the_file_does_not_align_is_read_all_the_same(tmp_path: Path) -> None:
    values = torch.randn(2)
    path = tmp_path / "model.safetensors"
    header = json.dumps({"a": entry()})
    path.write_bytes(raw_file(header + " " * (1 + -len(header) % 4), values.numpy().tobytes()))
    assert torch.equal(read_weight(read_safetensors(path)["a"]).data, values)


def test_tensors_without_elements_are_read(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(save({"none": torch.empty(0, 3), "one": torch.ones(())}))
    tensors = read_safetensors(path)
    assert (read_weight(tensors["none"]).shape, read_weight(tensors["one"]).data.item()) == ((0, 3), 1)


def test_vectors_come_out_as_float32(tmp_path: Path) -> None:
    stored = {"model.norm.weight": torch.randn(4).bfloat16()}
    stored["model.layers.0.self_attn.q_proj.bias"] = torch.randn(4).half()
    weights = LazyWeights(open_checkpoint(make_folder(tmp_path, stored)).tensors)
    assert {weight.type for weight in weights.values()} == {"F32"}
    assert all(torch.equal(weights[name].data, each.float()) for name, each in stored.items())


def test_both_configs_are_handed_on_as_they_are(tmp_path: Path) -> None:
    config = {"model_type": "qwen3", "rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}}
    folder = make_folder(tmp_path, {"lm_head.weight": torch.ones(2, 2)}, config)
    assert open_checkpoint(folder).generation_config == {}
    (folder / "generation_config.json").write_text('{"eos_token_id": [1, 2]}')
    checkpoint = open_checkpoint(str(folder))
    assert (checkpoint.path, checkpoint.metadata, checkpoint.config) == (folder, {}, config)
    assert checkpoint.generation_config == {"eos_token_id": [1, 2]}


def test_shards_read_as_one_model(tmp_path: Path) -> None:
    tensors = make_shards(tmp_path)
    weights = LazyWeights(open_checkpoint(tmp_path).tensors)
    assert weights.keys() == tensors.keys()
    assert all(torch.equal(weights[name].data, tensors[name]) for name in tensors)


FAULTS: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "expected at least 8 bytes, got 0"),
    "shorter than its header": (raw_file("{}", length=3), "header length at byte 0: expected at most 2 bytes, got 3"),
    "header length of 2⁶⁴ − 1": (raw_file("{}", length=2**64 - 1), f"got {2**64 - 1}"),
    "header that is not JSON": (raw_file('{"a": }'), "JSON at byte 14: Expecting value"),
    "header that is not UTF-8": (raw_file(b'{"\xff": 1}'), "JSON at byte 10: is not UTF-8"),
    "header that is no object": (raw_file("[]"), "expected an object, got list"),
    "header nested 100,000 deep": (raw_file("[" * 100_000), "cannot be read"),
    "number of 10,000 digits": (raw_file('{"a": ' + "1" * 10_000 + "}"), "cannot be read"),
    "duplicate tensor": (raw_file('{"a": 1, "a": 1}'), "key 'a' at byte 8: appears twice"),
    "duplicate field": (raw_file('{"a": {"dtype": "F32", "dtype": "F32"}}'), "key 'dtype' at byte 8: appears twice"),
    "entry that is no object": (raw_file({"a": 1}), "expected an object of dtype, shape and data_offsets"),
    "65,537 tensors": (
        raw_file({str(i): entry(shape=[0], offsets=[0, 0]) for i in range(65_537)}),
        "header at byte 8: expected at most 65536 tensors, got 65537",
    ),
    "missing field": (raw_file({"a": {"dtype": "F32"}}), "expected an object of dtype, shape and data_offsets"),
    "unknown dtype": (raw_file({"a": entry("F12")}), "'F12' is not a dtype"),
    "dtype that is a list": (raw_file({"a": entry([])}), "[] is not a dtype"),
    "negative dimension": (raw_file({"a": entry(shape=[-2])}), "integers from 0 to 2⁶³"),
    "dimension that is a bool": (raw_file({"a": entry(shape=[True, 2])}), "integers from 0 to 2⁶³"),
    "nine dimensions": (raw_file({"a": entry(shape=[1] * 9)}), "up to 8 integers"),
    "a product that overflows": (raw_file({"a": entry(shape=[2**32, 2**32])}), f"are {2**66} bytes"),
    "offsets that are no pair": (raw_file({"a": entry(offsets=[0])}), "data_offsets must be two integers"),
    "offsets that run backwards": (raw_file({"a": entry(offsets=[8, 0])}), "are 8 bytes, but data_offsets give -8"),
    "overlap": (
        raw_file({"a": entry(), "b": entry(offsets=[4, 12])}, bytes(12)),
        "overlaps the tensor before it: expected it at 8 of the data, got 4",
    ),
    "hole": (raw_file({"a": entry(), "b": entry(offsets=[12, 20])}, bytes(20)), "leaves a hole before it"),
    "hole at the start": (raw_file({"a": entry(offsets=[4, 12])}, bytes(12)), "leaves a hole before it"),
    "truncated": (raw_file({"a": entry()}, bytes(7)), "truncated: expected "),
    "trailing bytes": (raw_file({"a": entry()}, bytes(9)), "trailing bytes: expected "),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_broken_file_is_refused_with_the_reason_and_at_once(tmp_path: Path, fault: str) -> None:
    content, reason = FAULTS[fault]
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(content)
    assert reason in refusal(lambda: open_checkpoint(tmp_path), ModelFormatError)

    def refuse() -> None:
        with suppress(ModelFormatError):
            open_checkpoint(tmp_path)

    assert least_processor_seconds(refuse, 0.1) < 0.1


def test_tensors_whose_fields_are_spelled_otherwise_are_counted_too(tmp_path: Path) -> None:
    content = raw_file({str(i): entry(shape=[0], offsets=[0, 0]) for i in range(65_537)})
    content = content[8:].replace(b"data_offsets", b"data_o\\u0066fsets")
    (tmp_path / "model.safetensors").write_bytes(raw_file(content))
    with pytest.raises(ModelFormatError, match="expected at most 65536 tensors, got 65537"):
        read_safetensors(tmp_path / "model.safetensors")


@pytest.mark.parametrize("dtype", [torch.float8_e5m2, torch.int32, torch.float64])
def test_types_that_need_a_quantiser_of_their_own_are_refused_by_name(tmp_path: Path, dtype: torch.dtype) -> None:
    folder = make_folder(tmp_path, {"lm_head.weight": torch.ones(2, 2).to(dtype)})
    with pytest.raises(UnsupportedModelError, match=r"'lm_head\.weight' is (F8_E5M2|I32|F64): supported are F32,"):
        open_checkpoint(folder)


def test_two_names_for_one_weight_are_refused(tmp_path: Path) -> None:
    tensors = {"model.norm.weight": torch.ones(2), "language_model.model.norm.weight": torch.ones(2)}
    check_refused(lambda: open_checkpoint(make_folder(tmp_path, tensors)), "is the same weight as", ModelFormatError)


OUTSIDE = [
    ("missing.safetensors", "1 of 1 files is missing: copy or download 'missing.safetensors'"),
    ("../outside.safetensors", "is outside the model's folder"),
    ("link.safetensors", "is outside the model's folder"),
    ("/dev/zero", "is not a safetensors file"),
    ("pipe.safetensors", "is not a regular file"),
    ("device.safetensors", "is outside the model's folder"),
    ("loop.safetensors", "is missing"),
    ("nul\0.safetensors", "is missing"),
    ("a" * 5000 + ".safetensors", "is missing"),
    ("weights.bin", "is not a safetensors file"),
    (7, "expected an object of tensor names and file names"),
]


@pytest.mark.parametrize(("shard", "reason"), OUTSIDE)
def test_an_index_stays_in_the_models_folder(tmp_path: Path, shard: Any, reason: str) -> None:
    outside = tmp_path / "outside.safetensors"
    save_file({"a": torch.ones(2)}, outside)
    folder = tmp_path / "model"
    make_shards(folder)
    (folder / "link.safetensors").symlink_to(outside)
    (folder / "device.safetensors").symlink_to("/dev/zero")
    (folder / "loop.safetensors").symlink_to("loop.safetensors")
    os.mkfifo(folder / "pipe.safetensors")
    write_index(folder, {"a": shard})
    check_refused(lambda: open_checkpoint(folder), reason, ModelFormatError)


ONE, TWO = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"


Change = Callable[[Path], Any]


def both_in_the_second(folder: Path) -> None:
    save_file({"model.embed_tokens.weight": torch.zeros(6, 4), "lm_head.weight": torch.zeros(6, 4)}, folder / TWO)


def without(*names: str) -> Change:
    return lambda folder: [(folder / name).unlink() for name in names]


def second_is(content: bytes) -> Change:
    return lambda folder: (folder / TWO).write_bytes(content)


def cut_to(size: int) -> Change:
    return lambda folder: os.truncate(folder / TWO, size)


WRONG_SHARDS = [
    (without(TWO), f"1 of 2 files is missing: copy or download '{TWO}'"),
    (without(ONE, TWO), f"2 of 2 files are missing: .*'{ONE}', '{TWO}'"),
    (lambda folder: (folder / ONE).replace(folder / TWO), "1 of 2 files is missing"),
    (lambda folder: shutil.copy(folder / ONE, folder / TWO), rf"{TWO}: tensor 'model\.embed_tokens\.weight': is in"),
    (both_in_the_second, rf"{TWO}: tensor 'model\.embed_tokens\.weight': is in '{ONE}', too: the files belong to"),
    (cut_to(150), "truncated: expected .* got 150: copy or download the file again"),
    (cut_to(50), "expected at most 42 bytes, .*: copy or download the file again"),
    (cut_to(0), "expected at least 8 bytes, got 0: copy or download the file again"),
    (second_is(POINTER), f"{TWO}: file: is a pointer to a file of Git LFS: fetch it"),
    (second_is(b"<!doctype html>"), "this is not a safetensors file"),
    (without("model.safetensors.index.json"), f"found only '{ONE}': download the missing"),
]


@pytest.mark.parametrize(("change", "reason"), WRONG_SHARDS)
def test_shards_that_are_not_those_of_the_model_are_named(tmp_path: Path, change: Change, reason: str) -> None:
    make_shards(tmp_path)
    change(tmp_path)
    assert re.search(reason, refusal(lambda: open_checkpoint(tmp_path), ModelError))


INDEXES: list[tuple[Any, str]] = [
    ({"x": ONE}, f"missing tensors: 'x' in '{ONE}"),
    ({f"x{number}": ONE for number in range(9)}, f"'x4' in '{ONE}' and 4 more: the files belong to different"),
    *((wrong, "weight_map") for wrong in (None, [], {}, "x")),
]


@pytest.mark.parametrize(("weight_map", "reason"), INDEXES)
def test_an_index_that_does_not_fit_its_files_is_refused(tmp_path: Path, weight_map: Any, reason: str) -> None:
    make_shards(tmp_path)
    write_index(tmp_path, weight_map)
    check_refused(lambda: open_checkpoint(tmp_path), reason, ModelFormatError)


@pytest.mark.parametrize(("stored", "listed"), [(0, 1), (1, 0)])
def test_an_index_may_list_both_names_of_a_shared_matrix(tmp_path: Path, stored: int, listed: int) -> None:
    names = [*make_shards(tmp_path)]
    shard = (ONE, TWO)[stored]
    write_index(tmp_path, {names[stored]: shard, names[listed]: shard})
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"tie_word_embeddings": True}))
    assert open_checkpoint(tmp_path).tensors.keys() == {names[0]}


def test_the_links_of_a_hugging_face_cache_count_as_inside(tmp_path: Path) -> None:
    repository = tmp_path / "models--a--b"
    blobs, snapshot = repository / "blobs", repository / "snapshots" / "c0ffee"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    (blobs / "1").write_text("{}")
    save_file({"lm_head.weight": torch.ones(2, 2)}, blobs / "2")
    (snapshot / "config.json").symlink_to("../../blobs/1")
    (snapshot / "model.safetensors").symlink_to("../../blobs/2")
    assert open_checkpoint(snapshot).tensors.keys() == {"lm_head.weight"}


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth"])
def test_pickled_weights_are_never_opened_and_the_message_says_what_to_do(tmp_path: Path, name: str) -> None:
    (tmp_path / "config.json").write_text("{}")
    os.mkfifo(tmp_path / name)  # opening it would wait for ever
    with pytest.raises(ModelError, match=f"{name}, which can run code and is never opened: convert"):
        open_checkpoint(tmp_path)


def test_a_folder_without_weights_says_which_files_it_looked_for(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    check_refused(lambda: open_checkpoint(tmp_path), r"has no weights: expected model\.safetensors or", ModelError)


@pytest.mark.parametrize("method", ["bitsandbytes", "hqq", None])
@pytest.mark.parametrize("is_nested", [False, True])
def test_folders_of_unknown_methods_of_quantisation_are_refused_with_what_to_take(
    tmp_path: Path, method: str | None, is_nested: bool
) -> None:
    """Multimodal configs have the method next to the text part, where it must not be overlooked."""
    quantised = {"quantization_config": {"quant_method": method, "bits": 4} if method else {"bits": 4}}
    config = {"model_type": "llama", **quantised, **({"text_config": CONFIG} if is_nested else CONFIG)}
    folder = make_folder(tmp_path / "Model-4bit", {"lm_head.qweight": torch.zeros(2, dtype=torch.int32)}, config)
    expected = method or "a method that config.json does not name"
    with pytest.raises(UnsupportedModelError, match=f"Model-4bit: .* by {expected}, .* use .*bfloat16 .* GGUF"):
        open_checkpoint(folder)
