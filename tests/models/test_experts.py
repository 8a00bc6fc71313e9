"""Models with experts: a real model whose MLPs were divided into experts, and files with missing parts."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from infer.compute import ops
from infer.compute.kvcache.cache_settings import CacheSettings
from infer.compute.operands.architecture import Architecture
from infer.compute.operands.feed_forwards import Dense, Experts, Router
from infer.compute.operands.step import Step
from infer.compute.operands.weights import FileWeight, StoredWeight
from infer.engine.runner.caches import make_cache
from infer.engine.tensor_parallel.ranks import start_ranks
from infer.errors import InvalidRequestError, ModelError, UnsupportedModelError
from infer.files import open_checkpoint
from infer.files.tensors.lazy_weights import LazyWeights
from infer.models.families import make_architecture
from infer.models.from_checkpoint import load_tokenizer
from infer.models.load import FloatsAs, load_transformer
from infer.models.sharding import check_experts
from infer.models.transformer import Transformer
from infer.models.weight_loader import dense
from quantised_folders import set_config
from refusals import check_refused
from steps import load_network
from tiny import BY_NAME, change_tensors, make_tiny

COUNT = 4
CPU = torch.device("cpu")


def cut(architecture: Architecture, weights: Mapping[str, FileWeight]) -> tuple[Architecture, dict[str, FileWeight]]:
    """Return SmolLM2 with each MLP divided into four experts, which all tokens choose with weights of 1."""
    layers, found = [], dict[str, FileWeight]()
    for index, layer in enumerate(architecture.layers):
        assert isinstance(layer.feed_forward, Dense)
        size = layer.feed_forward.intermediate_size // COUNT
        router = Router(COUNT, COUNT, "softmax", scale=float(COUNT))  # equal logits: each weight is 1
        layers.append(replace(layer, feed_forward=Experts(router, size, layer.feed_forward.activation)))
        at = f"model.layers.{index}.mlp."
        found[f"{at}router.weight"] = stored(torch.zeros(COUNT, architecture.hidden_size))
        for which in ("gate", "up", "down"):
            whole = dense(weights[f"{at}{which}_proj.weight"].rows(0, weights[f"{at}{which}_proj.weight"].shape[0]))
            parts = whole.float().split(size, dim=1 if which == "down" else 0)
            found |= {f"{at}experts.{each}.{which}_proj.weight": stored(part) for each, part in enumerate(parts)}
    found |= {name: weight for name, weight in weights.items() if ".mlp." not in name}
    return replace(architecture, layers=tuple(layers)), found


def stored(values: torch.Tensor) -> StoredWeight:
    return StoredWeight("F32", tuple(values.shape), values.contiguous())


def greedy(model: Transformer, token_ids: list[int], count: int) -> list[int]:
    cache, found, next_ids = make_cache(model, 128), list[int](), token_ids
    with torch.inference_mode():
        for _ in range(count):
            start = cache.lengths[0]
            cache.reserve(0, len(next_ids))
            logits = model.forward(Step.of(next_ids, start), cache)
            cache.commit(0, len(next_ids))
            next_ids = [int(logits[-1].argmax())]
            found += next_ids
    return found


@pytest.mark.parametrize(
    ("kept", "num_layers"), [("auto", 4), *(pytest.param(kept, 30, marks=pytest.mark.slow) for kept in ("q8", "q4"))]
)
def test_smollm2_divided_into_experts_answers_as_smollm2(kept: FloatsAs, num_layers: int) -> None:
    """Few layers of SmolLM2 are a model, too."""
    checkpoint = open_checkpoint("smollm2")
    whole, weights = make_architecture(checkpoint.config), LazyWeights(checkpoint.tensors)
    unused = tuple(f"model.layers.{layer}." for layer in range(num_layers, len(whole.layers)))
    whole = replace(whole, layers=whole.layers[:num_layers])
    weights = {name: weight for name, weight in weights.items() if not name.startswith(unused)}
    architecture, divided = cut(whole, weights)
    model = load_transformer(architecture, divided, backend=ops.backend_of(CPU), keep_floats_as=kept, max_seq_len=128)
    expected = load_transformer(whole, weights, backend=ops.backend_of(CPU), max_seq_len=128)
    prompt, count = load_tokenizer(checkpoint).encode("The capital of France is"), 12 if kept != "q4" else 1
    assert greedy(model, prompt, count) == greedy(expected, prompt, count)


def make_folder(folder: Path, name: str = "qwen3_moe") -> dict[str, Any]:
    make_tiny(BY_NAME[name], folder)
    return json.loads((folder / "config.json").read_text())


def test_a_missing_expert_is_named(tmp_path: Path) -> None:
    make_folder(tmp_path)
    change_tensors(tmp_path, lambda tensors: tensors.pop("model.layers.1.mlp.experts.7.up_proj.weight"))
    with pytest.raises(ModelError, match=r"missing model\.layers\.1\.mlp\.experts\.7\.up_proj\.weight"):
        load_network(tmp_path)


def test_more_chosen_experts_than_there_are_are_refused(tmp_path: Path) -> None:
    make_folder(tmp_path)
    set_config(tmp_path, "num_experts_per_tok", 21)
    check_refused(lambda: load_network(tmp_path), r"num_experts_per_tok must be at most .*20, got 21", ModelError)


def test_stacked_experts_of_another_shape_are_refused(tmp_path: Path) -> None:
    make_folder(tmp_path, "granitemoe")
    name = "model.layers.0.block_sparse_moe.input_linear.weight"
    for part, problem in ((slice(4), "missing .*experts.4"), (0, "experts, rows and columns")):
        change_tensors(tmp_path, lambda own, part=part: own.update({name: own[name][part].contiguous()}))
        with pytest.raises(ModelError, match=problem):
            load_network(tmp_path)


def test_stacks_of_too_many_experts_are_refused_before_they_are_split(tmp_path: Path) -> None:
    make_folder(tmp_path, "granitemoe")
    wrong = {"model.layers.0.block_sparse_moe.output_linear.weight": torch.zeros(4097, 1, 1)}
    change_tensors(tmp_path, lambda tensors: tensors.update(wrong))
    check_refused(lambda: load_network(tmp_path), "expected at most 4096 experts, got 4097", ModelError)


def test_layers_that_only_draft_tokens_are_left_out(tmp_path: Path) -> None:
    config, drafting = make_folder(tmp_path, "glm4_moe"), torch.zeros(64, 128)
    assert config["num_nextn_predict_layers"] == 1
    change_tensors(tmp_path, lambda tensors: tensors.update({"model.layers.3.eh_proj.weight": drafting}))
    assert len(load_network(tmp_path).layers) == 3
    change_tensors(tmp_path, lambda tensors: tensors.update({"model.layers.4.eh_proj.weight": drafting}))
    check_refused(lambda: load_network(tmp_path), r"unexpected 'model\.layers\.4\.eh_proj\.weight", ModelError)


def test_a_device_without_a_part_names_it_in_its_refusal() -> None:
    for name, part in (("deepseek_v3", "latent attention"), ("granitemoehybrid", "Mamba2 layers")):
        with pytest.raises(UnsupportedModelError, match=f"model_type '{name}' is not supported: it needs {part}"):
            make_architecture({"model_type": name})


def test_dense_layers_are_those_that_the_config_lists(tmp_path: Path) -> None:
    config = make_folder(tmp_path, "qwen3_moe_mixed")
    found = [type(layer.feed_forward) for layer in make_architecture(config).layers]
    assert found == [Experts, Dense, Experts]
    with pytest.raises(ModelError, match=r"mlp_only_layers must list the numbers of layers, got 'one'"):
        make_architecture(config | {"mlp_only_layers": "one"})


def test_too_many_ranks_refuse_experts_in_a_line(tmp_path: Path) -> None:
    make_folder(tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    architecture = make_architecture(checkpoint.config)
    check_experts(architecture, 4)
    with pytest.raises(InvalidRequestError, match=r"tensor_parallel=5 gives .* expert's 64 rows: use at most 4$"):
        start_ranks(checkpoint, ("auto", "auto", "exact"), "cpu", CacheSettings(), 5)
