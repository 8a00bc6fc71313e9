"""Heads that draft tokens: their logits are those of the published equations, in each file format."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from torch import Tensor

from cases import cases
from converted import convert
from head_models import load_with_head, make_headed
from infer.compute.operands.step import Step
from infer.engine.runner.runner import make_cache
from infer.files import open_checkpoint
from infer.model_settings import ModelSettings
from infer.models.draft_plan import plan_draft, plan_draft_bytes
from infer.models.from_checkpoint import load_checked
from infer.models.memory.memory_estimate import LoadSettings
from infer.models.transformer import Transformer
from test_family_files import write_gguf
from tiny import DELTA_NETS, TINY, change_tensors

FAMILIES = ("qwen3_5", "qwen3_5_moe", "qwen3_next", "glm4_moe", "glm4_moe_plain")
BY_NAME = {tiny.name: tiny for tiny in TINY + DELTA_NETS}
IDS = [3, 50, 7, 7, 91, 22, 13, 64, 5]


@torch.inference_mode()
def run_head(head: Transformer, token_ids: list[int], states: Tensor) -> tuple[Tensor, Tensor]:
    """Return the head's logits after each token, and its states."""
    cache = make_cache(head, len(token_ids))
    cache.reserve(0, len(token_ids))
    assert head.state_input is not None
    step = Step.of(token_ids, logit_indices=range(len(token_ids)))
    head.state_input.write(token_ids, states)
    residual = head.residual(step, cache)
    return head.logits(residual, step), head.final_norm(residual)


def check_close(found: tuple[Tensor, Tensor], wanted: tuple[Tensor, Tensor]) -> None:
    for own, other in zip(found, wanted, strict=True):
        assert (own - other).abs().max() < 1e-3 * other.abs().max()


@pytest.mark.parametrize("name", FAMILIES)
@torch.inference_mode()
def test_a_head_has_the_published_logits(name: str, tmp_path: Path) -> None:
    """At each place: after the model's states, then after the head's own, as for a second draft."""
    published = make_headed(BY_NAME[name], tmp_path)
    model, head = load_with_head(tmp_path)
    assert head.head is model.head
    states = published.states(IDS)[:-1]
    found, wanted = run_head(head, IDS[1:], states), published(IDS[1:], states)
    check_close(found, wanted)
    check_close(run_head(head, IDS[2:], found[1][:-1]), published(IDS[2:], wanted[1][:-1]))


@pytest.mark.parametrize("name", ["qwen3_5", "glm4_moe"])
@torch.inference_mode()
def test_a_gguf_file_has_the_same_head(name: str, tmp_path: Path) -> None:
    published, num_layers = make_headed(BY_NAME[name], tmp_path), BY_NAME[name].config.num_hidden_layers
    _, expected = load_with_head(tmp_path)
    one = convert(tmp_path / "head", tmp_path / "one.gguf")
    own = f"model.layers.{num_layers}."

    def drop(tensors: dict[str, Tensor]) -> None:
        for key in [key for key in tensors if key.startswith(("mtp.", own))]:
            del tensors[key]

    change_tensors(tmp_path, drop)
    plain = convert(tmp_path, tmp_path / "plain.gguf")

    def add(tensors: dict[str, np.ndarray[Any, Any]]) -> None:
        at, layer = f"blk.{num_layers}.", open_gguf(one)
        tensors |= {key.replace("blk.0.", at): each for key, each in layer.items() if key.startswith("blk.0.")}
        tensors[f"{at}nextn.shared_head_norm.weight"] = layer["output_norm.weight"]
        for key, each in published.joining.items():
            tensors[f"{at}nextn.{key}.weight"] = (each + (published.added if each.dim() == 1 else 0)).numpy()

    both = write_gguf(tmp_path / "both.gguf", plain, add, block_count=num_layers + 1, nextn_predict_layers=1)
    _, head = load_with_head(both)
    states = published.states(IDS)[:-1]
    for found, wanted in zip(run_head(head, IDS[1:], states), run_head(expected, IDS[1:], states), strict=True):
        assert torch.equal(found, wanted)


def open_gguf(path: Path) -> dict[str, np.ndarray[Any, Any]]:
    return {each.name: np.array(each.data) for each in gguf.GGUFReader(path).tensors}


def test_a_head_is_planned_unless_settings_exclude_it(tmp_path: Path) -> None:
    make_headed(BY_NAME["qwen3_5"], tmp_path)
    checkpoint, load = open_checkpoint(tmp_path), LoadSettings()
    num_bytes, longer = (plan_draft_bytes(ModelSettings(), checkpoint, length, load) for length in (64, 256))
    assert 4 * 64 * (2 * 64 + 3 * 96) < num_bytes < longer < num_bytes + 10**6
    for settings in ({"draft_head": False}, {"tensor_parallel": 2}, {"device": "cuda"}):
        assert plan_draft(ModelSettings(**settings), checkpoint, 256) is None
        assert plan_draft_bytes(ModelSettings(**settings), checkpoint, 256, load) == 0


@cases(
    "changed",
    {"mtp.fc.weight": None},
    {"mtp.fc.weight": (64, 64)},
    {"mtp.norm.weight": (1, 1, 64)},
    {"mtp.layers.0.self_attn.q_proj.weight": (3, 64)},
)
def test_a_model_runs_without_a_head_that_has_faults(changed: dict[str, Any], tmp_path: Path) -> None:
    make_headed(BY_NAME["qwen3_5"], tmp_path)

    def change(tensors: dict[str, Tensor]) -> None:
        for name, shape in changed.items():
            tensors.pop(name)
            tensors |= {} if shape is None else {name: torch.zeros(shape)}

    change_tensors(tmp_path, change)
    checkpoint = open_checkpoint(tmp_path)
    assert plan_draft(ModelSettings(), checkpoint, 256) is None
    assert load_checked(checkpoint, None, ModelSettings()).architecture.layers
