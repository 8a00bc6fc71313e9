"""Whole models with unusual attention on the backend for GPUs, in Triton's interpreter with repeats as graphs."""

from pathlib import Path

import pytest
import torch

from extent import IS_WHOLE
from infer import ops
from test_families import expected_logits, load, random_ids
from tiny import GATED, GEMMA4, MINISTRAL3, MUSE_GLIMMER, Tiny, make_tiny

pytest.importorskip("triton", reason="Triton is not installed")

from test_cuda_paths import LENGTHS, logits_of

pytestmark = pytest.mark.usefixtures("quick_interpreter")
FAMILIES = [
    tiny for tiny in (*GEMMA4, *MINISTRAL3, *MUSE_GLIMMER, *GATED) if not tiny.has_experts and tiny.name != "gemma4_moe"
]


@pytest.mark.parametrize("tiny", FAMILIES, ids=lambda tiny: tiny.name)
def test_a_family_computes_what_transformers_does_and_a_replay_has_its_bits(tiny: Tiny, tmp_path: Path) -> None:
    oracle, ids = make_tiny(tiny, tmp_path), random_ids(sum(LENGTHS))
    with ops.using("cuda"):
        model = load(tmp_path)
    found = logits_of(model, ids, is_captured=False)
    assert (found - expected_logits(oracle, ids)).abs().max() <= 1e-4
    if tiny.name in ("gemma4_per_layer", "ministral3") or IS_WHOLE:
        assert torch.equal(logits_of(model, ids, is_captured=True), found)
