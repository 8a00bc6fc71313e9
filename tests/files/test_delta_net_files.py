"""Files of Qwen3-Next and Qwen3.5: fused projections, drafting layers, impossible metadata."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf.quants import quantize
from safetensors.torch import load_file
from torch import Tensor

from converted import convert
from gguf_files import write_file
from infer.compute.operands.weights import UnreadWeight
from infer.compute.quantization.ggml_blocks import dequantize
from infer.errors import ModelError
from infer.files import Checkpoint, open_checkpoint
from infer.files.tensors.lazy_weights import LazyWeights
from infer.models.families import make_architecture
from infer.models.tensors import check_tensors, expected_shapes
from infer.models.weight_loader import dense
from refusals import check_refused, refusal
from tiny import BY_NAME, change_tensors, make_tiny

AT, Q_PROJ = "model.layers.0.linear_attn", "model.layers.3.self_attn.q_proj"
Q8_0 = gguf.GGMLQuantizationType.Q8_0


def make_folder(name: str, folder: Path) -> Any:
    return make_tiny(BY_NAME[name], folder)


def converted(name: str, folder: Path) -> Path:
    """Write a folder and the file of its model, and return the file."""
    make_folder(name, folder)
    return convert(folder, folder / "plain.gguf")


def values_of(checkpoint: Checkpoint) -> dict[str, Tensor]:
    """Return every tensor of the architecture, after the names and shapes are checked."""
    architecture, weights = make_architecture(checkpoint.config), LazyWeights(checkpoint.tensors)
    check_tensors(architecture, checkpoint.tensors)
    return {name: dense(weights[name]) for name in expected_shapes(architecture)}


def assert_same(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert torch.equal(found[name], tensor), name


def write_gguf(path: Path, source: Path, change: Callable[[dict[str, np.ndarray]], Any], **settings: Any) -> Path:
    """Write a copy of a file with other tensors, and other settings under the architecture's name."""
    reader = gguf.GGUFReader(source)
    architecture = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(path, architecture)
    values = {key: field.contents() for key, field in reader.fields.items() if key.startswith(f"{architecture}.")}
    values |= {f"{architecture}.{key.replace('__', '.')}": value for key, value in settings.items()}
    for key, value in values.items():
        add: Any = {float: writer.add_float32, list: writer.add_array}.get(type(value), writer.add_uint32)
        if value is not None:
            add(key, value)
    tensors = {each.name: np.array(each.data) for each in reader.tensors}
    change(tensors)
    for name, tensor in tensors.items():
        writer.add_tensor(name, tensor, raw_dtype=Q8_0 if tensor.dtype == np.uint8 else None)
    return write_file(writer, path)


@pytest.mark.parametrize("name", ["qwen3_next", "qwen3_next_mixed"])
def test_any_rows_of_a_fused_projection_are_read_from_their_places(name: str, tmp_path: Path) -> None:
    net = make_folder(name, tmp_path).model.layers[0].linear_attn
    fused = (module.weight.detach().T[None] for module in (net.in_proj_qkvz, net.in_proj_ba))
    q, k, v, z, b, a = (part.reshape(64, -1).T for part in net.fix_query_key_value_ordering(*fused))
    weights = LazyWeights(open_checkpoint(tmp_path).tensors)
    for which, wanted in {"qkv": torch.cat([q, k, v]), "z": z, "b": b, "a": a}.items():
        weight, count = weights[f"{AT}.{which}_proj.weight"], len(wanted)
        assert isinstance(weight, UnreadWeight)
        assert weight.shape == wanted.shape
        assert torch.equal(weight.data, wanted)
        for first, last in ((0, 1), (count - 1, count), (1, count - 1), (count // 2, count // 2), (3, 5)):
            rows = weight.rows(first, last)
            assert rows.shape == (last - first, 64)
            assert torch.equal(rows.data, wanted[first:last])


def test_a_fused_projection_of_another_size_is_named(tmp_path: Path) -> None:
    make_folder("qwen3_next", tmp_path)
    change_tensors(tmp_path, lambda tensors: tensors.update({f"{AT}.in_proj_ba.weight": torch.zeros(10, 64)}))
    with pytest.raises(ModelError, match=r"in_proj_ba\.weight'.*expected 12 rows for 2 key heads, got .*\(10, 64\)$"):
        open_checkpoint(tmp_path)


def test_fused_projections_are_split_in_gguf_files_too(tmp_path: Path) -> None:
    plain, folder = converted("qwen3_next", tmp_path), load_file(tmp_path / "model.safetensors")

    def fuse(tensors: dict[str, np.ndarray]) -> None:
        """Store one projection for everything, as older files do."""
        for layer in range(3):
            del tensors[f"blk.{layer}.attn_qkv.weight"], tensors[f"blk.{layer}.attn_gate.weight"]
            fused = folder[f"model.layers.{layer}.linear_attn.in_proj_qkvz.weight"]
            tensors[f"blk.{layer}.ssm_in.weight"] = fused.numpy()

    older = write_gguf(tmp_path / "older.gguf", plain, fuse)
    assert_same(values_of(open_checkpoint(older)), values_of(open_checkpoint(plain)))


def test_rows_of_blocks_are_gathered_as_they_are_stored(tmp_path: Path) -> None:
    plain = converted("qwen3_next", tmp_path)
    name = "blk.0.ssm_ba.weight"
    path = write_gguf(tmp_path / "q8.gguf", plain, lambda own: own.update({name: quantize(own[name], Q8_0)}))
    weights, floats = LazyWeights(open_checkpoint(path).tensors), LazyWeights(open_checkpoint(plain).tensors)
    for which in "ba":
        weight, wanted = weights[f"{AT}.{which}_proj.weight"], floats[f"{AT}.{which}_proj.weight"]
        assert (weight.type, weight.shape) == ("Q8_0", (6, 64))
        found = dequantize(weight.data, weight.type).reshape(6, 64)
        assert (found - wanted.data).abs().max() < 0.01
        assert torch.equal(dequantize(weight.rows(2, 5).data, weight.type).reshape(3, 64), found[2:5])


def test_layers_that_only_draft_tokens_are_left_out(tmp_path: Path) -> None:
    plain, wanted = converted("qwen3_5", tmp_path), values_of(open_checkpoint(tmp_path))
    extra = {"mtp.fc.weight": torch.zeros(64, 128), "mtp.layers.0.mlp.up_proj.weight": torch.zeros(96, 64)}
    change_tensors(tmp_path, lambda tensors: tensors.update(extra))
    assert_same(values_of(open_checkpoint(tmp_path)), wanted)

    def add(tensors: dict[str, np.ndarray]) -> None:
        tensors |= {name.replace("blk.3", "blk.4"): each for name, each in tensors.items() if name.startswith("blk.3")}
        tensors["blk.4.nextn.eh_proj.weight"] = np.zeros((64, 128), np.float32)
        tensors["blk.4.nextn.shared_head_norm.weight"] = np.zeros(64, np.float32)

    flags = [True, True, True, False, False]
    for settings in ({}, {"attention__recurrent_layers": flags}):
        more = {"block_count": 5, "nextn_predict_layers": 1, **settings}
        drafting = write_gguf(tmp_path / f"drafting-{len(settings)}.gguf", plain, add, **more)
        assert_same(values_of(open_checkpoint(drafting)), values_of(open_checkpoint(plain)))


def test_stacks_of_experts_are_those_of_single_ones(tmp_path: Path) -> None:
    oracle = make_folder("qwen3_5_moe", tmp_path)
    wanted = values_of(open_checkpoint(tmp_path))

    def stack(tensors: dict[str, Tensor]) -> None:
        """Store experts as published files do."""
        for name in [name for name in tensors if ".mlp.experts." in name]:
            del tensors[name]
        for index, layer in enumerate(oracle.model.layers):
            at = f"model.layers.{index}.mlp.experts"
            for name in ("gate_up_proj", "down_proj"):
                tensors[f"{at}.{name}"] = getattr(layer.mlp.experts, name).detach().clone()

    change_tensors(tmp_path, stack)
    assert_same(values_of(open_checkpoint(tmp_path)), wanted)


def test_a_fused_projection_of_attention_has_the_rows_of_gates_among_those_of_q(tmp_path: Path) -> None:
    plain = converted("qwen3_5_uneven", tmp_path)

    def fuse(tensors: dict[str, np.ndarray]) -> None:
        for kind in ("weight", "bias"):
            tensors[f"blk.0.attn_qkv.{kind}"] = np.concatenate([tensors.pop(f"blk.0.attn_{x}.{kind}") for x in "qkv"])

    fused = open_checkpoint(write_gguf(tmp_path / "fused.gguf", plain, fuse))
    assert_same(values_of(fused), values_of(open_checkpoint(plain)))


def test_a_projection_without_gates_is_named(tmp_path: Path) -> None:
    make_folder("qwen3_5", tmp_path)
    change_tensors(tmp_path, lambda tensors: tensors.update({f"{Q_PROJ}.weight": torch.zeros(132, 64)}))
    with pytest.raises(ModelError, match=r"q_proj\.weight'.*expected rows of q and a gate for each of 4 heads"):
        open_checkpoint(tmp_path)


EMPTY_PARTS = [
    (f"{AT}.in_proj_ba", {"linear_num_key_heads": 2**30}, (0, 64), "expected 0 rows for 1073741824"),
    (f"{AT}.in_proj_ba", {"linear_num_value_heads": 1}, (0, 64), "expected 0 rows for 2 key heads"),
    (f"{AT}.in_proj_qkvz", {"linear_num_key_heads": 2**30}, (0, 64), "rows for 1073741824 key heads"),
    (Q_PROJ, {"num_attention_heads": 2**30}, (0, 64), "a gate for each of 1073741824 heads"),
    (Q_PROJ, {}, (), "a gate for each of 4 heads"),
]


@pytest.mark.parametrize(("name", "settings", "shape", "problem"), EMPTY_PARTS)
def test_parts_without_rows_cost_nothing(
    name: str, settings: dict[str, int], shape: tuple[int, ...], problem: str, tmp_path: Path
) -> None:
    make_folder("qwen3_next", tmp_path)
    change_tensors(tmp_path, lambda tensors: tensors.update({f"{name}.weight": torch.zeros(shape)}))
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | settings))
    check_refused(lambda: open_checkpoint(tmp_path), problem, ModelError)


IMPOSSIBLE_METADATA = [
    ({"ssm__inner_size": 97}, "ssm.inner_size: expected a multiple of 6 value heads, got 97"),
    ({"ssm__time_step_rank": 0}, "ssm.time_step_rank: expected an integer from 1"),
    ({"ssm__conv_kernel": None}, "ssm.conv_kernel: is missing"),
    ({"attention__recurrent_layers": [True] * 3}, "recurrent_layers: expected a flag for each of 4 layers"),
    ({"attention__recurrent_layers": [1, 1, 1, 0]}, "recurrent_layers: expected a flag for each of 4 layers"),
    ({"full_attention_interval": 0}, "full_attention_interval: expected an integer from 1"),
]


@pytest.mark.parametrize(("settings", "message"), IMPOSSIBLE_METADATA)
def test_metadata_that_cannot_be_is_refused_in_a_line(settings: dict[str, Any], message: str, tmp_path: Path) -> None:
    plain = converted("qwen3_5", tmp_path)
    path = write_gguf(tmp_path / "model.gguf", plain, lambda tensors: None, **settings)
    assert message in refusal(lambda: open_checkpoint(path), ModelError)
