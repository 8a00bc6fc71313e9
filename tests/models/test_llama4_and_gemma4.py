"""Llama 4's attention in chunks, and Gemma 4's inputs for each layer: configs, files and rows of whole models."""

import copy
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from converted import convert
from extent import IS_WHOLE
from infer.compute.backends import reference
from infer.compute.backends.cpu import operations as cpu
from infer.compute.operands.architecture import Architecture
from infer.compute.operands.step import Step
from infer.compute.operands.weights import FilePlace, Norm, PerLayerWeights, Projection, StoredWeight, UnreadWeight
from infer.compute.quantization.ggml_types import GGML_TYPES
from infer.engine.runner.runner import make_cache
from infer.errors import UnsupportedModelError
from infer.files import open_checkpoint
from infer.files.config import config_from_gguf
from infer.files.gguf.gguf import read_gguf
from infer.models.families import make_architecture
from infer.models.memory.memory_estimate import LoadSettings, loaded_types, weight_bytes
from infer.models.transformer import Transformer
from test_cpu_kernels import CPU, make_weight
from test_families import load
from test_recurrent_rows import CAPACITY, SETTINGS, ModelRows, go_on_at_random
from tiny import BY_NAME, LLAMA4, Tiny, change_tensors, make_tiny

CHUNKS = BY_NAME["llama4_chunks"]
CONFIG = CHUNKS.config.to_dict()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Transformer:
    folder, longer = tmp_path_factory.mktemp("llama4"), copy.deepcopy(CHUNKS.config)
    longer.max_position_embeddings = CAPACITY
    make_tiny(Tiny("llama4_chunks", longer), folder)
    return load(folder)


@pytest.mark.slow(rest=1)
@pytest.mark.parametrize("seed", range(2))
@torch.inference_mode()
def test_rows_continue_as_one_text_after_any_operations(model: Transformer, seed: int) -> None:
    go_on_at_random(ModelRows(model), seed, 120)


@torch.inference_mode()
def test_a_long_row_holds_the_pages_of_its_own_chunk(model: Transformer) -> None:
    cache = make_cache(model, CAPACITY, settings=SETTINGS, step_tokens=16)
    chunked, full = sorted(cache.groups, key=lambda rows: rows.group.chunk is None)
    assert (chunked.group.chunk, full.group.chunk) == (23, None)
    for start in range(0, CAPACITY, 16):
        count = min(16, CAPACITY - start)
        cache.reserve(0, count)
        model.residual(Step.of([3] * count, start), cache)
        cache.commit(0, count)
        cache.check_integrity()
    page_tokens = chunked.table.page_tokens
    most = -(-(23 + 16) // page_tokens) + 1
    assert len(chunked.table.page_by_index(0)) <= most < len(full.table.page_by_index(0))


def test_layers_that_do_not_rotate_see_all_tokens_and_scale_their_queries() -> None:
    layers = make_architecture(CONFIG).attention
    assert [layer.chunk for layer in layers] == [23, None, 23, 23]
    assert [layer.qk_norm for layer in layers] == ["head_unweighted", None, "head_unweighted", "head_unweighted"]
    assert [layer.query_scale is not None for layer in layers] == [False, True, False, False]


def test_an_empty_list_of_layers_without_rope_is_the_usual_order() -> None:
    plain = {name: value for name, value in CONFIG.items() if name != "layer_types"}
    layers = make_architecture(plain | {"no_rope_layers": []}).attention
    assert [(layer.rope is None, layer.chunk) for layer in layers] == [(False, 23)] * 3 + [(True, None)]


def architecture_of_file(tmp_path: Path, settings: dict[str, int]) -> Architecture:
    """Return the architecture of a GGUF file with other settings."""
    make_tiny(LLAMA4[0], tmp_path)
    file = read_gguf(convert(tmp_path, tmp_path / "model.gguf"))
    return make_architecture(config_from_gguf(replace(file, metadata={**file.metadata, **settings})))


def test_a_file_without_a_window_rotates_everywhere_and_sees_all(tmp_path: Path) -> None:
    layers = architecture_of_file(tmp_path, {"llama4.attention.sliding_window": 0}).attention
    assert all(layer.chunk is None and layer.rope is not None and layer.query_scale is None for layer in layers)


def test_a_file_has_chunks_of_8192_in_the_layers_of_its_pattern(tmp_path: Path) -> None:
    layers = architecture_of_file(tmp_path, {"llama4.attention.sliding_window_pattern": 3}).attention
    assert [layer.chunk for layer in layers] == [8192, 8192, None, 8192, 8192]
    assert [layer.rope is None for layer in layers] == [False, False, False, True, False]


def test_a_file_of_128_experts_has_no_norms(tmp_path: Path) -> None:
    layers = architecture_of_file(tmp_path, {"llama4.expert_count": 128}).attention
    assert {layer.qk_norm for layer in layers} == {None}


VOCAB, LAYERS, DIM, HIDDEN = 40, 6, 256, 64
TOKENS = torch.tensor([3, 0, 39, 3, 17])
TYPES = [kind.name for kind in GGML_TYPES.values()]


def table_in(folder: Path, type_: str) -> tuple[UnreadWeight, int]:
    """Return a table of random rows in a file, with the file's descriptor, which the caller closes."""
    whole = make_weight(type_, VOCAB, LAYERS * DIM)
    (folder / "table").write_bytes(b"four" + whole.data.contiguous().view(torch.uint8).numpy().tobytes())
    descriptor = os.open(folder / "table", os.O_RDONLY)
    place = FilePlace(descriptor, 4)
    return UnreadWeight(whole.type, whole.shape, lambda low, high: whole.data[low:high], place), descriptor


def weights_with(table: UnreadWeight) -> PerLayerWeights:
    generator = torch.Generator().manual_seed(1)
    rows = StoredWeight("F32", (LAYERS * DIM, HIDDEN), torch.randn(LAYERS * DIM, HIDDEN, generator=generator) * 0.1)
    return PerLayerWeights(table, 0.75, Projection((rows,)), Norm(torch.rand(DIM, generator=generator), 1e-6))


@pytest.mark.slow
@pytest.mark.parametrize("type_", TYPES if IS_WHOLE else TYPES[::3])
def test_rows_of_a_table_in_a_file_have_the_values_of_the_table(type_: str, tmp_path: Path) -> None:
    table, descriptor = table_in(tmp_path, type_)
    weights = weights_with(table)
    nothing = replace(weights, norm=Norm(torch.zeros(DIM), 1e-6))
    ready = replace(nothing, projection=cpu.prepare(nothing.projection, CPU))
    x = torch.randn(len(TOKENS), HIDDEN)
    found = cpu.per_layer_inputs(x, TOKENS, ready)
    rows = torch.cat([reference.dense(table.rows(token, token + 1)) for token in TOKENS.tolist()])
    assert torch.equal(found, rows.float() * 0.75)
    together = cpu.per_layer_inputs(x, TOKENS, replace(weights, projection=ready.projection))
    assert torch.allclose(together, reference.per_layer_inputs(x, TOKENS, weights), atol=2e-5, rtol=1e-5)
    alone = replace(weights, projection=ready.projection)
    each = [cpu.per_layer_inputs(x[at : at + 1], TOKENS[at : at + 1], alone) for at in range(5)]
    assert torch.equal(torch.cat(each), together)
    os.close(descriptor)


def test_a_table_that_became_shorter_gives_no_numbers_for_the_rows_that_are_gone(tmp_path: Path) -> None:
    table, descriptor = table_in(tmp_path, "Q8_0")
    weights = weights_with(table)
    ready = replace(weights, projection=cpu.prepare(weights.projection, CPU))
    os.truncate(tmp_path / "table", 4 + 20 * table.row_bytes)
    found = cpu.per_layer_inputs(torch.randn(len(TOKENS), HIDDEN), TOKENS, ready)
    assert [row.isnan().all().item() for row in found] == [False, False, True, False, False]
    assert not found[[0, 1, 3, 4]].isnan().any()
    os.close(descriptor)


@pytest.mark.slow(cases=2)
@pytest.mark.parametrize("first", [0, 256, 512])
@pytest.mark.parametrize("num_tokens", [1, 19])
def test_gates_of_inputs_agree_with_reference(first: int, num_tokens: int) -> None:
    gate = Projection((make_weight("F32", DIM, HIDDEN),))
    x, inputs = torch.randn(num_tokens, HIDDEN), torch.randn(num_tokens, 3 * DIM)
    found = cpu.gate_inputs(x, cpu.prepare(gate, CPU), "gelu_tanh", inputs, first).floats
    wanted = reference.gate_inputs(x, gate, "gelu_tanh", inputs, first).floats
    assert torch.allclose(found, wanted, atol=2e-5)


def folder_of(name: str, folder: Path, **changed: Any) -> Path:
    config = copy.deepcopy(BY_NAME[name].config)
    for setting, value in changed.items():
        setattr(config, setting, value)
    make_tiny(Tiny(name, config), folder)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gemma4_per_layer", "gemma4_moe"])
@torch.inference_mode()
def test_rows_with_inputs_of_layers_continue_as_one_text(name: str, tmp_path: Path) -> None:
    go_on_at_random(ModelRows(load(folder_of(name, tmp_path, max_position_embeddings=CAPACITY))), 0, 80)


def test_a_table_takes_no_memory_of_a_host_and_its_bytes_on_a_gpu(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(folder_of("gemma4_per_layer", tmp_path))
    architecture = make_architecture(checkpoint.config)
    types = loaded_types(architecture, checkpoint.tensors, LoadSettings(weights="q8"))
    assert types["model.embed_tokens_per_layer.weight"] == "F32"
    halves = types | {"model.embed_tokens_per_layer.weight": "BF16"}
    assert weight_bytes(architecture, types) == weight_bytes(architecture, halves)
    table = 96 * len(architecture.layers) * 24
    assert weight_bytes(architecture, types, "cuda") - weight_bytes(architecture, halves, "cuda") == 2 * table


def test_files_may_have_keys_of_layers_that_use_an_earlier_layers(tmp_path: Path) -> None:
    folder = folder_of("gemma4_shared", tmp_path)
    unused = {f"model.layers.5.self_attn.{part}.weight": torch.ones(2) for part in ("k_proj", "v_proj", "k_norm")}
    change_tensors(folder, lambda tensors: tensors.update(unused))
    load(folder)


def test_a_table_of_another_vocabulary_is_refused(tmp_path: Path) -> None:
    config = BY_NAME["gemma4_per_layer"].config.to_dict()
    with pytest.raises(UnsupportedModelError, match="vocab_size_per_layer_input=95 is not supported: it must be vocab"):
        make_architecture(config | {"vocab_size_per_layer_input": 95})
