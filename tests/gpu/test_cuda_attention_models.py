"""Whole models with unusual attention on the backend for GPUs, in Triton's interpreter with repeats as graphs."""

from pathlib import Path

import pytest
import torch

from extent import IS_WHOLE
from infer import ops
from infer.operands.step import Step
from steps import load_network
from test_families import expected_logits, load, make_reserved, random_ids
from tiny import GATED, GEMMA4, MINISTRAL3, MUSE_GLIMMER, Tiny, make_tiny

pytest.importorskip("triton", reason="Triton is not installed")

from test_cuda_paths import LENGTHS, logits_of

pytestmark = pytest.mark.usefixtures("quick_interpreter")
SOME = ("gemma4", "gemma4_per_layer", "ministral3", "muse_glimmer", "qwen3_5_gates")
WITHOUT_EXPERTS = [
    tiny for tiny in (*GEMMA4, *MINISTRAL3, *MUSE_GLIMMER, *GATED) if not tiny.has_experts and tiny.name != "gemma4_moe"
]
FAMILIES = [tiny for tiny in WITHOUT_EXPERTS if IS_WHOLE or tiny.name in SOME]


@pytest.mark.parametrize("tiny", FAMILIES, ids=lambda tiny: tiny.name)
def test_a_family_computes_what_transformers_does_and_a_replay_has_its_bits(tiny: Tiny, tmp_path: Path) -> None:
    oracle, ids = make_tiny(tiny, tmp_path), random_ids(sum(LENGTHS))
    with ops.using("cuda"):
        model = load(tmp_path)
    found = logits_of(model, ids, is_captured=False)
    assert (found - expected_logits(oracle, ids)).abs().max() <= 1e-4
    if tiny.name == "gemma4_per_layer" or IS_WHOLE:
        assert torch.equal(logits_of(model, ids, is_captured=True), found)


@pytest.mark.parametrize("tiny", FAMILIES if IS_WHOLE else FAMILIES[1:3], ids=lambda tiny: tiny.name)
@torch.inference_mode()
def test_a_quantised_model_has_the_same_bits_in_one_step_and_in_several(tiny: Tiny, tmp_path: Path) -> None:
    make_tiny(tiny, tmp_path)
    ids = random_ids(sum(LENGTHS))
    with ops.using("cuda"):
        model = load_network(tmp_path, keep_floats_as="q8")
    whole = model.forward(Step.of(ids, logit_indices=range(len(ids))), make_reserved(model))
    assert torch.equal(whole, logits_of(model, ids, is_captured=False))
