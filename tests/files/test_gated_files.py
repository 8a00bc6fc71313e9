"""GGUF files of models with gated attention: the meaning of their settings, and refusals."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from converted import convert
from infer.compute.operands.architecture import Architecture
from infer.compute.operands.feed_forwards import Dense
from infer.errors import ModelError
from infer.files.config import config_from_gguf
from infer.files.gguf.gguf import GGUFFile, read_gguf
from infer.models.families import make_architecture
from refusals import refusal
from tiny import LAGUNA, MUSE_GLIMMER, Tiny, make_tiny


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


def test_the_gates_and_heads_of_laguna_are_those_of_the_file(tmp_path: Path) -> None:
    layers = with_settings(file_of(LAGUNA[0], tmp_path), {}).layers
    assert [layer.mixer.num_heads for layer in layers] == [4, 6, 6, 6]
    assert all(layer.mixer.are_gates_of_heads and layer.mixer.gate_curve == "softplus" for layer in layers)
    assert [isinstance(layer.feed_forward, Dense) for layer in layers] == [True, False, False, False]
    (tmp_path / "elements").mkdir()
    by_element = with_settings(file_of(LAGUNA[1], tmp_path / "elements"), {}).attention
    assert not any(layer.are_gates_of_heads for layer in by_element)


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


def test_norms_of_muse_glimmer_have_the_scale_of_queries_as_weights(tmp_path: Path) -> None:
    found = with_settings(file_of(MUSE_GLIMMER[0], tmp_path), {})
    assert [layer.qk_norm for layer in found.attention] == ["head"] * 5
    assert [layer.scale for layer in found.attention] == [32**-0.5] * 5
    assert [layer.rope is None for layer in found.attention] == [True, False, False, False, True]
    assert found.logit_scale == pytest.approx(0.7)
