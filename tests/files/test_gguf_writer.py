"""Claims about written GGUF files: bytes are those of the `gguf` package, and types those of llama.cpp's tool."""

import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import numpy as np
import pytest
import torch

from gguf_files import random_tensors, write_model
from infer.compute.quantization.file_types import FILE_TYPES, sorting_key
from infer.compute.quantization.quantisers import quantise
from infer.errors import InvalidRequestError, ModelError
from infer.files.gguf import quantised_file
from infer.files.gguf.gguf import TypedValue, read_gguf, read_whole_gguf
from infer.files.gguf.gguf_writer import TensorPlan, write_gguf
from infer.files.gguf.quantised_file import (
    QuantisableModel,
    QuantisationRequest,
    choose_types,
    model_of_gguf,
    write_quantised,
)
from infer.files.tensors.tensor_info import TensorInfo

# For each model and file type: digests of the types that llama-quantize chose, without and with an importance matrix.
# A digest is None if it refused.
RECORDED = json.loads((Path(__file__).parents[1] / "data" / "llama-quantize-types.json").read_text())


class Shaped(NamedTuple):
    name: str
    shape: tuple[int, ...]
    type: str = "F32"

    def read(self, first: int, last: int) -> torch.Tensor:
        raise NotImplementedError


class Recorded(NamedTuple):
    architecture: str
    layers: int
    heads: int
    key_heads: int
    hidden: int
    inner: int
    experts: int = 0
    is_tied: bool = True

    def model(self) -> QuantisableModel:
        sizes = {"block_count": self.layers, "attention.head_count": self.heads, "expert_count": self.experts}
        sizes["attention.head_count_kv"] = self.key_heads
        values = {f"{self.architecture}.{key}": TypedValue("u32", value) for key, value in sizes.items()}
        values["general.architecture"] = TypedValue("string", self.architecture)
        tensors = [Shaped("token_embd.weight", (64, self.hidden)), Shaped("output_norm.weight", (self.hidden,))]
        tensors += [] if self.is_tied else [Shaped("output.weight", (64, self.hidden))]
        for layer in range(self.layers):
            tensors += [Shaped(f"blk.{layer}.{name}.weight", shape) for name, shape in self.layer().items()]
        return QuantisableModel(values, tensors)

    def layer(self) -> dict[str, tuple[int, ...]]:
        keys, hidden, inner = self.hidden // self.heads * self.key_heads, self.hidden, self.inner
        found: dict[str, tuple[int, ...]] = {"attn_norm": (hidden,), "ffn_norm": (hidden,)}
        found |= {"attn_output": (hidden, hidden)}
        if self.architecture in ("phi3", "falcon"):
            rows = 2 * inner if self.architecture == "phi3" else inner
            joined = {"attn_qkv": (hidden + 2 * keys, hidden)}
            return found | joined | {"ffn_up": (rows, hidden), "ffn_down": (hidden, inner)}
        found |= {"attn_q": (hidden, hidden), "attn_k": (keys, hidden), "attn_v": (keys, hidden)}
        matrices = {"ffn_gate": (inner, hidden), "ffn_up": (inner, hidden), "ffn_down": (hidden, inner)}
        if not self.experts:
            return found | matrices
        stacks = {f"{name}_exps": (self.experts, *shape) for name, shape in matrices.items()}
        return found | stacks | {"ffn_gate_inp": (self.experts, hidden)}


MODELS = {
    "dense": Recorded("llama", 19, 4, 2, 256, 256),
    "gqa": Recorded("qwen3", 8, 8, 2, 256, 512, is_tied=False),
    "eight": Recorded("llama", 9, 4, 1, 256, 256, 8, is_tied=False),
    "moe": Recorded("qwen3moe", 10, 4, 4, 256, 256, 4),
    "odd": Recorded("gemma3", 6, 4, 1, 160, 288),
    "phi": Recorded("phi3", 16, 4, 4, 256, 272, is_tied=False),
    "falcon": Recorded("falcon", 20, 4, 1, 256, 256, is_tied=False),
}


def digest(types: dict[str, str]) -> str:
    joined = " ".join(types[name] for name in sorted(types, key=sorting_key))
    return hashlib.sha256(joined.encode()).hexdigest()[:8]


@pytest.mark.parametrize("name", MODELS)
def test_tensors_get_the_types_that_llama_quantize_chose(name: str) -> None:
    model = MODELS[name].model()
    matrix = {tensor.name: np.ones(1, np.float32) for tensor in model.tensors if tensor.name != "token_embd.weight"}
    found: dict[str, list[str | None]] = {}
    for file_type in RECORDED[name]:
        for importance in ({}, matrix):
            try:
                chosen = digest(choose_types(model, QuantisationRequest(file_type, importance=importance)))
            except InvalidRequestError:  # it needs a matrix
                chosen = None
            found.setdefault(file_type, []).append(chosen)
    assert found == RECORDED[name]
    assert len(found) >= len(FILE_TYPES) - 1


def test_named_types_come_before_the_mixture() -> None:
    model = MODELS["gqa"].model()
    request: dict[str, Any] = {"tensor_types": [("ffn_down", "Q8_0"), (r"blk\.[01]\.ffn", "F16")]}
    types = choose_types(model, QuantisationRequest("Q4_K_S", **request, output_type="Q5_1", embedding_type="Q3_K"))
    assert (types["output.weight"], types["token_embd.weight"]) == ("Q5_1", "Q3_K")
    assert (types["blk.0.ffn_down.weight"], types["blk.0.ffn_up.weight"]) == ("Q8_0", "F16")
    assert (types["blk.0.ffn_norm.weight"], types["blk.2.ffn_up.weight"]) == ("F32", "Q4_K")
    pure = choose_types(model, QuantisationRequest("Q4_K_S", is_pure=True))
    assert {pure[tensor.name] for tensor in model.tensors if len(tensor.shape) > 1} == {"Q4_K"}
    tied = choose_types(MODELS["dense"].model(), QuantisationRequest("Q4_K_S", output_type="Q8_0"))
    assert tied["token_embd.weight"] == "Q8_0"
    with pytest.raises(InvalidRequestError, match="attn_z matches no tensor"):
        choose_types(model, QuantisationRequest("Q4_K_S", tensor_types=[("attn_z", "Q8_0")]))


def test_pieces_have_the_rows_and_importance_of_their_expert(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    noise = np.random.default_rng(0)
    experts, importance = noise.standard_normal((3, 5, 64), np.float32), noise.random((3, 64), np.float32)
    name = "blk.0.ffn_down_exps.weight"
    tensors = random_tensors("llama") | {name: experts}
    model = model_of_gguf(read_gguf(write_model(tmp_path / "m.gguf", tensors=tensors)))
    request = QuantisationRequest("Q4_0", importance={name: importance}, is_pure=True, importance_path="i.gguf")
    monkeypatch.setattr(quantised_file, "_PIECE_VALUES", 2 * 64)
    seen: list[tuple[int, int]] = []
    types = choose_types(model, request)
    write_quantised(tmp_path / "q.gguf", model, request, types, 2, lambda done, total: seen.append((done, total)))
    written = read_gguf(tmp_path / "q.gguf")
    info = written.tensors[name]
    again = QuantisationRequest("Q4_0", importance={name: importance.reshape(-1)}, is_pure=True)  # as in .dat files
    write_quantised(tmp_path / "again.gguf", model, again, types, 2)
    other = read_gguf(tmp_path / "again.gguf").tensors[name]
    assert other.file.read(other.offset, other.num_bytes) == info.file.read(info.offset, info.num_bytes)
    expected = [quantise(torch.from_numpy(experts[i]), "Q4_0", torch.from_numpy(importance[i])) for i in range(3)]
    assert info.file.read(info.offset, info.num_bytes) == torch.cat(expected).numpy().tobytes()
    assert seen[-1] == (seen[-1][1], sum(values.size for values in tensors.values()))
    keys = "quantize.imatrix.file", "quantize.imatrix.entries_count", "general.file_type"
    assert [written.metadata[key] for key in keys] == ["i.gguf", 1, 2]


def test_a_matrix_of_another_model_is_refused(tmp_path: Path) -> None:
    model = model_of_gguf(read_gguf(write_model(tmp_path / "m.gguf")))
    request = QuantisationRequest("Q8_0", importance={"blk.0.ffn_up.weight": np.ones(63, np.float32)})
    with pytest.raises(InvalidRequestError, match=r"has 63 numbers for tensor 'blk.0.ffn_up.weight' of \(96, 64\)"):
        write_quantised(tmp_path / "q.gguf", model, request, choose_types(model, request), 1)
    assert not (tmp_path / "q.gguf").exists()


def test_values_that_are_not_finite_name_their_tensor(tmp_path: Path) -> None:
    tensors = random_tensors("llama")
    tensors["blk.0.ffn_up.weight"][3, 4] = np.nan
    model = model_of_gguf(read_gguf(write_model(tmp_path / "m.gguf", tensors=tensors)))
    request = QuantisationRequest("Q8_0")
    with pytest.raises(ModelError, match=r"blk.0.ffn_up.weight.*not finite"):
        write_quantised(tmp_path / "q.gguf", model, request, choose_types(model, request), 1)
    assert list(tmp_path.iterdir()) == [tmp_path / "m.gguf"]


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
