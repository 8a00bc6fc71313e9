"""Attention in chunks, from config and files to the pages of a cache, and the text part of Llama 4."""

import copy
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from converted import convert
from infer.compute.operands.architecture import Architecture
from infer.compute.operands.step import Step
from infer.engine.runner.caches import make_cache
from infer.files.config import config_from_gguf
from infer.files.gguf.gguf import read_gguf
from infer.models.families import make_architecture
from infer.models.transformer import Transformer
from test_families import load
from test_recurrent_rows import CAPACITY, SETTINGS, go_on_at_random
from test_shared_keys import ModelRows
from tiny import BY_NAME, LLAMA4, Tiny, make_tiny

CHUNKS = BY_NAME["llama4_chunks"]
CONFIG = CHUNKS.config.to_dict()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Transformer:
    folder, longer = tmp_path_factory.mktemp("llama4"), copy.deepcopy(CHUNKS.config)
    longer.max_position_embeddings = CAPACITY
    make_tiny(Tiny("llama4_chunks", longer), folder)
    return load(folder)


@pytest.mark.slow
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
