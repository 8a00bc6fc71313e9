"""Files of single families: fused projections, drafting layers, gated attention, MXFP4, and impossible metadata.

Every family from a GGUF file gives the logits of the safetensors it was converted from, and is exported alike.
"""

import copy
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf.quants import quantize
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from converted import convert
from gguf_files import write_file
from infer.compute import ops
from infer.compute.operands.architecture import Architecture
from infer.compute.operands.weights import UnreadWeight
from infer.compute.quantization.ggml_blocks import dequantize
from infer.errors import ModelError, ModelFormatError
from infer.files import Checkpoint, open_checkpoint
from infer.files.config import config_from_gguf
from infer.files.gguf.gguf import GGUFFile, TypedValue, read_gguf
from infer.files.tensors.lazy_weights import LazyWeights, read_weight
from infer.models.families import make_architecture
from infer.models.gguf_export.plan import network_plan
from infer.models.tensors import check_tensors, expected_shapes
from infer.models.weight_loader import dense
from refusals import check_refused, refusal
from steps import load_network, logits_of
from tiny import BY_NAME, CENTRED, DELTA_NETS, LAGUNA, LONGROPE, ROWS, TINY, Tiny, change_tensors, make_tiny

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


def file_of(tiny: Tiny, tmp_path: Path) -> GGUFFile:
    make_tiny(tiny, tmp_path)
    return read_gguf(convert(tmp_path, tmp_path / "model.gguf"))


def with_settings(file: GGUFFile, settings: dict[str, Any]) -> Architecture:
    return make_architecture(config_from_gguf(replace(file, metadata={**file.metadata, **settings})))


def test_a_number_as_the_pattern_of_laguna_begins_with_full_attention(tmp_path: Path) -> None:
    file = file_of(LAGUNA[0], tmp_path)
    assert [layer.window for layer in with_settings(file, {}).attention] == [None, 9, 9, 9]
    every_second = with_settings(file, {"laguna.attention.sliding_window_pattern": 2})
    assert [layer.window for layer in every_second.attention] == [None, 9, None, 9]
    listed = with_settings(file, {"laguna.attention.sliding_window_pattern": [True, False, True, True]})
    assert [layer.window for layer in listed.attention] == [9, None, 9, 9]


LACKED = [
    ({"laguna.expert_gating_func": 1}, "expert_gating_func 1 is not supported for laguna: 2"),
    ({"laguna.expert_weights_norm": False}, "expert_weights_norm False is not supported for laguna: True"),
    ({"laguna.leading_dense_block_count": 5}, "leading_dense_block_count: expected an integer from 0 to 4, got 5"),
    ({"laguna.attention.head_count": [4, 6]}, "num_attention_heads_per_layer must list 4 numbers, got [4, 6]"),
    ({"laguna.rope.dimension_count_swa": None}, "rope.dimension_count_swa: is missing"),
    ({"laguna.attention.sliding_window_pattern": 0}, "expected a number or one flag per layer, got 0"),
]


@pytest.mark.parametrize(("settings", "message"), LACKED)
def test_settings_that_laguna_lacks_are_refused(tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    assert message in refusal(lambda: with_settings(file_of(LAGUNA[0], tmp_path), settings), ModelError)


def make_quantized(folder: Path) -> Any:
    """Write a folder of gpt-oss with random MXFP4 matrices, and return the model of `transformers`."""
    model = make_tiny(BY_NAME["gpt_oss"], folder)
    tensors, generator = load_file(folder / "model.safetensors"), torch.Generator().manual_seed(1)
    for name in [name for name in tensors if name.endswith("_proj") and ".experts." in name]:
        num_experts, columns, rows = tensors.pop(name).shape
        shape = num_experts, rows, columns // 32
        blocks = torch.randint(0, 256, (*shape, 16), generator=generator).to(torch.uint8)
        scales = torch.randint(121, 126, shape, generator=generator).to(torch.uint8)
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        with torch.no_grad():
            floats = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
            model.get_parameter(name).copy_(floats)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = (folder / "config.json").read_text()
    quantized = '{"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": []},'
    (folder / "config.json").write_text(config.replace("{", quantized, 1))
    return model


@pytest.mark.parametrize(
    "dtype", [torch.float32, pytest.param(None, marks=pytest.mark.slow)], ids=["floats", "as stored"]
)
def test_mxfp4_folders_give_the_logits_of_transformers(dtype: torch.dtype | None, tmp_path: Path) -> None:
    oracle = make_quantized(tmp_path)
    token_ids = torch.randint(3, 96, (60,), generator=torch.Generator().manual_seed(0)).tolist()
    with torch.inference_mode():
        expected = oracle(torch.tensor([token_ids])).logits[0]
    logits = logits_of(load_network(tmp_path, dtype=dtype), token_ids)
    # By default, the cache is f16, and activations of stored matrices have 16 bits.
    assert (logits - expected).abs().max() <= (1e-4 if dtype is torch.float32 else 2e-2)
    assert (logits.argmax(-1) == expected.argmax(-1)).float().mean() > 0.95


def test_parts_of_a_stack_are_the_rows_of_each_expert(tmp_path: Path) -> None:
    make_quantized(tmp_path)
    stored, weights = load_file(tmp_path / "model.safetensors"), LazyWeights(open_checkpoint(tmp_path).tensors)
    at = "model.layers.1.mlp.experts"
    whole = convert_moe_packed_tensors(
        stored[f"{at}.gate_up_proj_blocks"], stored[f"{at}.gate_up_proj_scales"], dtype=torch.float32
    )
    for expert in range(6):
        for first, which in enumerate(("gate", "up")):
            found = weights[f"{at}.{expert}.{which}_proj.weight"]
            assert isinstance(found, UnreadWeight)
            expected = whole[expert, :, first::2].T
            for low, high in ((0, 96), (5, 6), (40, 96)):
                rows = found.rows(low, high)
                assert torch.equal(dequantize(rows.data, rows.type).reshape(rows.shape), expected[low:high])
            bias = weights[f"{at}.{expert}.{which}_proj.bias"]
            assert torch.equal(bias.data, stored[f"{at}.gate_up_proj_bias"][expert, first::2])


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda tensors, at: tensors.pop(f"{at}_scales"), "expected a tensor of its scales next to it"),
        (lambda tensors, at: tensors.pop(f"{at}_blocks"), "expected a tensor of its blocks next to it"),
        (lambda tensors, at: tensors.update({f"{at}_scales": torch.zeros(6, 192, 3, dtype=torch.uint8)}), "the shape"),
        (lambda tensors, at: tensors.update({f"{at}_scales": torch.zeros(6, 192, 2)}), r"expected bytes \(U8\)"),
        (lambda tensors, at: tensors.update({f"{at}_scales": torch.zeros((), dtype=torch.uint8)}), "experts, rows and"),
        (lambda tensors, at: tensors.update({at: torch.zeros(6, 64, 192)}), "is the same weight as"),
    ],
    ids=["no scales", "no blocks", "another shape", "another type", "no axes", "floats too"],
)
def test_parts_that_do_not_fit_together_are_named(change: Any, problem: str, tmp_path: Path) -> None:
    make_quantized(tmp_path)
    change_tensors(tmp_path, lambda tensors: change(tensors, "model.layers.2.mlp.experts.gate_up_proj"))
    with pytest.raises(ModelFormatError, match=rf"model\.layers\.2\.mlp\.experts\.gate_up_proj_\w+'.*{problem}"):
        open_checkpoint(tmp_path)


# Files of every family


# Settings that llama.cpp's files cannot express: another activation, some settings of yarn, an unusual order of layers
# without rotation, a cap that is off.
_NOT_IN_GGUF = {"llama_relu", "llama_relu2", "llama_quick_gelu", "llama_odd_sizes", "llama_yarn_mscale"}
_NOT_IN_GGUF |= {"gemma3_capped", "gemma2_uncapped", "smollm3_windows", "qwen3_moe_mixed", "gpt_oss_plain"}
_NOT_IN_GGUF |= {"mellum_mixed", "muse_glimmer_listed", "llama4_chunks", "llama4_plain", "lfm2_biases"}
_NOT_IN_GGUF |= {"lfm3", "lfm2_moe_plain", "qwen3_next_mixed", "olmo_hybrid", "olmo_hybrid_rotated"}
_IN_GGUF_TOO = {"gemma", "glm4", "glm4_whole", "ernie4_5", "ernie4_5_biases", "arcee"}
_IN_GGUF_TOO |= {"hunyuan_v1_dense", "starcoder2", "starcoder2_plain", "cohere", "cohere2"}
_IN_GGUF_TOO |= {"minimax_m2", "afmoe", "exaone_moe", "hunyuan_v1_moe", "dots1_full"}
_IN_GGUF_TOO |= {"apertus", "stablelm", "stablelm_parallel", "stablelm_norms", "nemotron", "phi", "olmo", "exaone"}
_IN_GGUF_TOO |= {"granitemoeshared", "internlm3", "iquestcoder", "ernie4_5_moe", "jais2", "glm", "solar_open"}
_IN_GGUF_TOO |= {"sarvam_moe", "gpt2", "gpt_neox", "gpt_neox_in_turn", "gpt_neox_wide"}
_NOT_IN_GGUF |= {tiny.name for tiny in (*ROWS, *CENTRED) if tiny.name not in _IN_GGUF_TOO}
CONVERTED = [tiny for tiny in [*TINY, LONGROPE] if tiny.name not in _NOT_IN_GGUF]


def logits(path: Path) -> torch.Tensor:
    token_ids = torch.randint(3, 96, (100,), generator=torch.Generator().manual_seed(0)).tolist()
    with ops.using("reference"):
        return logits_of(load_network(path, dtype=torch.float32), token_ids)


def assert_exported_alike(folder: Path, file: GGUFFile) -> None:
    """Check that the export has the keys and the tensors of the file, in its types and shapes."""
    plan = network_plan(open_checkpoint(folder))
    keys = {key: TypedValue(file.value_types[key], value) for key, value in file.metadata.items()}
    assert {key: value for key, value in keys.items() if plan.values.get(key) != value} == {}
    assert {tensor.name: tensor.shape for tensor in plan.tensors} == {
        name: info.shape for name, info in file.tensors.items()
    }
    for tensor in plan.tensors:
        stored = read_weight(file.tensors[tensor.name]).data.reshape(tensor.num_rows, -1)
        torch.testing.assert_close(tensor.read(0, tensor.num_rows), stored, rtol=1e-6, atol=0)


@pytest.mark.slow(cases=6, rest=14)
@pytest.mark.parametrize("tiny", CONVERTED, ids=lambda tiny: tiny.name)
def test_a_converted_file_gives_the_logits_of_the_folder(tiny: Tiny, tmp_path: Path) -> None:
    config = copy.deepcopy(tiny.config)
    if "query_pre_attn_scalar" in vars(config):
        config.query_pre_attn_scalar = config.head_dim  # as in files of all sizes except two
    if "post_norm_eps" in vars(config):
        config.post_norm_eps = 1e-8  # a constant of llama.cpp
    make_tiny(replace(tiny, config=config), tmp_path)
    path = convert(tmp_path, tmp_path / "model.gguf")
    assert_exported_alike(tmp_path, read_gguf(path))
    # The value heads of a delta net have another order in a file, and so have the sums over them.
    assert (logits(path) - logits(tmp_path)).abs().max() <= (2e-4 if tiny in DELTA_NETS else 2e-5)
