"""Layers with a state on a GPU, in Triton's interpreter: the definition's results, and bits that depend on no path."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from extent import IS_WHOLE
from infer import ops
from test_families import expected_logits, load, random_ids
from test_recurrent_rows import PAGE, TAPS, Rows, go_on_at_random, make
from tiny import RECURRENT, Tiny, make_tiny

pytest.importorskip("triton", reason="Triton is not installed")

from test_cuda_paths import LENGTHS, logits_of

pytestmark = pytest.mark.usefixtures("quick_interpreter")
CONVOLUTIONS = RECURRENT if IS_WHOLE else RECURRENT[:3]


def long_text(length: int) -> list[int]:
    return torch.randint(0, 50, (length,), generator=torch.Generator().manual_seed(0)).tolist()


def in_steps(rows: Rows, text: Sequence[int], sizes: Sequence[int]) -> Tensor:
    """Return the results of a row's text in steps of some sizes, which repeat."""
    parts, start = list[Tensor](), 0
    while start < len(text):
        part = list(text[start : start + sizes[len(parts) % len(sizes)]])
        parts.append(rows.step({2: part}))
        start += len(part)
    return torch.cat(parts)


@pytest.mark.parametrize("sizes", [[1], [TAPS - 2, PAGE], [5, 1, 30, 3, 2], [69]], ids=str)
def test_bits_of_a_convolution_do_not_depend_on_the_chunks(sizes: list[int]) -> None:
    text = long_text(70)
    whole = Rows(make(step_tokens=600), "cuda").step({0: text})
    assert torch.equal(in_steps(Rows(make(step_tokens=600), "cuda"), text, sizes), whole)


def test_rows_of_convolutions_go_on_as_one_text_whatever_happens_to_them() -> None:
    go_on_at_random(Rows(make(), "cuda"), 0, 300 if IS_WHOLE else 70)


@pytest.mark.parametrize("tiny", CONVOLUTIONS, ids=lambda tiny: tiny.name)
def test_a_family_with_states_computes_what_transformers_does_and_a_replay_has_its_bits(
    tiny: Tiny, tmp_path: Path
) -> None:
    oracle, ids = make_tiny(tiny, tmp_path), random_ids(sum(LENGTHS))
    with ops.using("cuda"):
        model = load(tmp_path)
    found = logits_of(model, ids, is_captured=False)
    assert (found - expected_logits(oracle, ids)).abs().max() <= 1e-4
    assert torch.equal(logits_of(model, ids, is_captured=True), found)
