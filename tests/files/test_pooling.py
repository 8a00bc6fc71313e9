"""Files of embedding models: their pooling and layers, and a line for each that is not supported."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from embedding_model import make_qwen3, write_dense, write_modules
from gguf_files import HIDDEN, random_tensors, write_model
from infer.errors import ModelError, UnsupportedModelError
from infer.files import open_checkpoint
from infer.files.heads.pooling import LayerFiles, embedding_from_folder
from infer.models.pooled_head import load_head
from refusals import check_refused, refusal

MEAN = {"pooling_mode_mean_tokens": True}
PIPELINE = ["Transformer", "Pooling", "Dense", "Normalize"]


def write_pipeline(folder: Path, kinds: list[str], pooling: dict[str, Any]) -> None:
    write_modules(folder, kinds)
    if "Pooling" in kinds:
        path = folder / f"{kinds.index('Pooling')}_Pooling" / "config.json"
        path.write_text(json.dumps({"word_embedding_dimension": 8, **pooling}))
    size = 8
    for place, kind in enumerate(kinds):
        if kind == "Dense":
            write_dense(folder / f"{place}_Dense", size, size + 1, True, "Tanh")
            size += 1


POOLINGS = [
    ({"pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": False}, "last"),
    (MEAN, "mean"),
    ({}, "mean"),
    ({"pooling_mode_cls_token": True}, "cls"),
    ({"pooling_mode_max_tokens": True}, "max"),
    ({"pooling_mode_weightedmean_tokens": True}, "weightedmean"),
    ({"pooling_mode_mean_sqrt_len_tokens": True}, "mean_sqrt_len"),
    ({"pooling_mode": "lasttoken"}, "last"),
    ({"pooling_mode": ["mean"]}, "mean"),
    ({"pooling_mode": "cls"}, "cls"),
    ({"pooling_mode": "mean_sqrt_len_tokens"}, "mean_sqrt_len"),
]


@pytest.mark.parametrize(("settings", "pooling"), POOLINGS)
def test_a_folder_of_modules_says_how_it_pools(tmp_path: Path, settings: dict[str, Any], pooling: str) -> None:
    assert embedding_from_folder(tmp_path) is None
    write_pipeline(tmp_path, ["Transformer", "Pooling"], settings)
    found = embedding_from_folder(tmp_path)
    assert found is not None
    assert (found.pooling, found.head, found.normalizes, found.skips_prompt) == (pooling, (), False, False)


def test_layers_are_kept_in_their_order(tmp_path: Path) -> None:
    write_pipeline(tmp_path, [*PIPELINE[:3], "Dense", "Normalize"], {"include_prompt": False} | MEAN)
    found = embedding_from_folder(tmp_path)
    assert found is not None
    assert (found.normalizes, found.skips_prompt) == (True, True)
    sizes = [step.weight.shape if isinstance(step, LayerFiles) else step for step in found.head]
    assert sizes == [(9, 8), "tanh", (10, 9), "tanh"]


def test_a_transformer_by_itself_makes_no_vectors(tmp_path: Path) -> None:
    write_modules(tmp_path, ["Transformer"])
    assert embedding_from_folder(tmp_path) is None


def dense_config(**changes: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / "2_Dense" / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return change


def pickle_only(folder: Path) -> None:
    (folder / "2_Dense" / "model.safetensors").rename(folder / "2_Dense" / "pytorch_model.bin")


def remove_weights(folder: Path) -> None:
    (folder / "2_Dense" / "model.safetensors").unlink()


def leave_folder(folder: Path) -> None:
    (folder / "modules.json").write_text('[{"type": "a.Pooling", "path": "../other"}]')


def keep(folder: Path) -> None:
    pass


REFUSED_MODULES = [
    (PIPELINE, {"pooling_mode": "median"}, keep, "1_Pooling/config.json has the pooling 'median': supported is"),
    (PIPELINE, {"pooling_mode_mean_tokens": True, "pooling_mode_max_tokens": True}, keep,
     "has the pooling 'mean_tokens and max_tokens': supported is one of cls, max_tokens"),
    (["Transformer", "SpladePooling"], {}, keep, "modules.json has the module 'SpladePooling': after Transformer"),
    (["Transformer", "Dense"], {}, keep, "has the module 'Dense': after Transformer, only Pooling"),
    (["Transformer", "Pooling", "LSTM"], MEAN, keep, "has the module 'LSTM': after Pooling, only Dense layers"),
    (["Transformer", "Pooling", "Normalize", "Dense"], MEAN, keep, "module 'Normalize': after Pooling, only Dense"),
    (PIPELINE, MEAN, dense_config(activation_function="torch.nn.modules.activation.Mish"),
     "2_Dense/config.json has the activation_function 'torch.nn.modules.activation.Mish', supported are Identity"),
    (PIPELINE, MEAN, dense_config(module_input_name="token_embeddings"), "module_input_name 'token_embeddings'"),
    (PIPELINE, MEAN, dense_config(use_residual=True), "use_residual True, supported is False"),
    (PIPELINE, MEAN, pickle_only, "2_Dense/pytorch_model.bin can run code and is never opened: save the module"),
    (PIPELINE, MEAN, remove_weights, "'2_Dense/model.safetensors': is missing"),
    (PIPELINE, MEAN, leave_folder, "is outside the model's folder|is missing"),
]  # fmt: skip


@pytest.mark.parametrize(("kinds", "pooling", "change", "message"), REFUSED_MODULES)
def test_modules_that_would_change_vectors_are_refused_by_name(
    tmp_path: Path, kinds: list[str], pooling: dict[str, Any], change: Callable[[Path], None], message: str
) -> None:
    write_pipeline(tmp_path, kinds, pooling)
    change(tmp_path)
    assert re.search(message, refusal(lambda: embedding_from_folder(tmp_path), ModelError))


@pytest.mark.parametrize("text", ['{"type": "a"}', '["Pooling"]', '[{"type": 5}]', '[{"type": "a", "path": 5}]', "["])
def test_a_broken_list_of_modules_is_an_error_of_the_model(tmp_path: Path, text: str) -> None:
    (tmp_path / "modules.json").write_text(text)
    check_refused(lambda: embedding_from_folder(tmp_path), r"modules\.json: (JSON|modules)", ModelError)


def test_a_layer_that_does_not_fit_is_found_when_the_model_is_loaded(tmp_path: Path) -> None:
    from infer import LLM

    make_qwen3(tmp_path)
    write_pipeline(tmp_path, PIPELINE, MEAN)
    check_refused(lambda: LLM(tmp_path), r"tensor 'linear.weight': expected \(9, 64\), got \(9, 8\)", ModelError)


@pytest.mark.parametrize(("number", "pooling"), [(0, None), (1, "mean"), (2, "cls"), (3, "last"), (4, None)])
def test_a_gguf_file_says_how_it_pools(tmp_path: Path, number: int, pooling: str | None) -> None:
    write_model(tmp_path / "a.gguf", "qwen3", extend=lambda writer: writer.add_uint32("qwen3.pooling_type", number))
    found = open_checkpoint(tmp_path / "a.gguf").embedding
    assert (None if found is None else found.pooling) == pooling
    write_model(tmp_path / "b.gguf", "qwen3")
    assert open_checkpoint(tmp_path / "b.gguf").embedding is None


@pytest.mark.parametrize("number", [5, 99])
def test_an_unknown_pooling_of_a_gguf_file_is_refused(tmp_path: Path, number: int) -> None:
    write_model(tmp_path / "a.gguf", "qwen3", extend=lambda writer: writer.add_uint32("qwen3.pooling_type", number))
    message = rf"qwen3.pooling_type {number} is not supported: supported are 1 \(mean\), 2 \(cls\), 3 \(last\)"
    check_refused(lambda: open_checkpoint(tmp_path / "a.gguf"), message, UnsupportedModelError)


def test_a_gguf_file_has_two_dense_layers(tmp_path: Path) -> None:
    noise = np.random.default_rng(0)
    shapes = {"dense_2.weight": (96, HIDDEN), "dense_3.weight": (HIDDEN, 96)}
    weights = {name: noise.standard_normal(shape, dtype=np.float32) for name, shape in shapes.items()}
    tensors, pooling = random_tensors("qwen3") | weights, gguf.PoolingType.MEAN
    write_model(tmp_path / "a.gguf", "qwen3", tensors, extend=lambda writer: writer.add_pooling_type(pooling))
    checkpoint = open_checkpoint(tmp_path / "a.gguf")
    assert not [name for name in checkpoint.tensors if name.startswith("dense")]
    assert checkpoint.embedding is not None
    first, second = (torch.from_numpy(each).double() for each in weights.values())
    state = torch.randn(HIDDEN).double()
    torch.testing.assert_close(load_head(checkpoint.embedding.head).of(state), second @ (first @ state))
