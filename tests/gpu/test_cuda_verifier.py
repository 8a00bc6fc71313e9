"""Claims about drafts that are verified on a GPU, in Triton's interpreter: all lines at once give what
`runner.runner` gives one by one."""

from copy import deepcopy
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from infer.compute.operands.step import Chunk, Masks
from infer.compute.ops import SampledStep
from infer.compute.sampling.columns import SamplingColumns
from infer.compute.sampling.history import History
from infer.engine.runner.runner import verify
from infer.sampling_params import SamplingParams

pytest.importorskip("triton", reason="Triton is not installed")

from infer.compute.backends.cuda.graphs import Recording, Repeats
from infer.compute.backends.cuda.sampled import Verifier
from test_gpu_sampler import drawn_batch

pytestmark = pytest.mark.usefixtures("quick_interpreter")
CPU = torch.device("cpu")
VOCAB_SIZE, MAX_LINES = 61, 16
NUM_LINES = (3, 1, 0, 5, 2, 3)  # of each row; none within a prompt


class Rows(NamedTuple):
    """The sampled lines of logits, row after row, and the index of each row's first line."""

    logits: Tensor
    positions: list[int]
    columns: SamplingColumns
    history: History
    masks: Tensor | None


def make_rows(seed: int) -> Rows:
    logits, _, _, _, allowed = drawn_batch(seed, sum(NUM_LINES), VOCAB_SIZE)
    _, columns, history, positions, _ = drawn_batch(seed + 1, len(NUM_LINES), VOCAB_SIZE)
    return Rows(logits, positions.tolist(), columns, history, allowed)


def first_lines(counts: list[int]) -> list[int]:
    """Return the first lines of each row, as many as `counts` has for it."""
    starts = np.cumsum([0, *NUM_LINES]).tolist()
    return [start + entry for start, count in zip(starts, counts, strict=False) for entry in range(count)]


def filled(words: Tensor) -> Masks:
    return Masks(words, np.ones(1, np.int64), lambda: None, lambda *_: False)


def one_by_one(rows: Rows, drafts: list[list[int]], history: History) -> list[list[int]]:
    counts = [min(len(mine) + 1, most) for mine, most in zip(drafts, NUM_LINES, strict=True)]
    lines = first_lines(counts)
    masks = None if rows.masks is None else filled(rows.masks[lines])
    return verify(rows.logits[lines], step_of(rows, drafts, history, masks)).token_ids


def step_of(rows: Rows, drafts: list[list[int]], history: History, masks: Masks | None) -> SampledStep:
    return SampledStep(chunks_of(drafts), [position - 2 for position in rows.positions], rows.columns, history, masks)


def chunks_of(drafts: list[list[int]]) -> list[Chunk]:
    return [
        Chunk(slot, [3, 4, *mine], len(mine), has_logits=count > 0)
        for slot, (mine, count) in enumerate(zip(drafts, NUM_LINES, strict=True))
    ]


def right_drafts(rows: Rows) -> list[list[int]]:
    """Return the tokens that would be sampled. Tokens after a failed row may be anything."""
    drafts = [list[int]() for _ in NUM_LINES]
    for _ in range(max(NUM_LINES) - 1):
        found = one_by_one(rows, drafts, deepcopy(rows.history))
        for mine, ids, count in zip(drafts, found, NUM_LINES, strict=True):
            if len(mine) + 1 < count:
                mine.append(max(ids[-1], 0))
    return drafts


@pytest.mark.slow
def test_all_lines_at_once_give_what_they_give_one_by_one_and_the_history_sees_it() -> None:
    verifier, kept = Verifier(MAX_LINES, CPU, Repeats()), list[int]()
    for seed in range(0, 10, 2):
        rows = make_rows(seed)
        drafts = right_drafts(rows)
        for row, entry in ((0, 1), (5, 0))[: 1 + seed % 4]:
            drafts[row][entry] = (drafts[row][entry] + 1) % VOCAB_SIZE
        ours, theirs = deepcopy(rows.history), deepcopy(rows.history)
        masks = None
        if rows.masks is not None:
            masks = filled(rows.masks)
        padded = torch.full((MAX_LINES, VOCAB_SIZE + 3), torch.nan)
        padded[: len(rows.logits), :VOCAB_SIZE] = rows.logits
        forward = Recording(lambda: None, padded)
        found = verifier.launch(forward, step_of(rows, drafts, ours, masks)).wait().token_ids
        assert found == one_by_one(rows, drafts, theirs)
        for name in ("lengths", "last", "counts", "tokens"):
            assert torch.equal(getattr(ours, name), getattr(theirs, name)), name
        kept += map(len, found)
    assert {0, 1, 2, 5} <= set(kept)


@pytest.mark.parametrize("name", ["repetition_penalty", "frequency_penalty", "presence_penalty"])
def test_a_draft_is_in_the_history_of_the_lines_after_it(name: str) -> None:
    """Greedy: token 5 leads until it was generated, then 9 until it was, and only drafts say that they were."""
    logits = torch.zeros(3, VOCAB_SIZE)
    logits[:, 5], logits[:, 9] = 2.0, 1.9
    params = SamplingParams(temperature=0, repetition_window=1, **{name: 1.5})
    columns, history = SamplingColumns.of([params], VOCAB_SIZE), History(1, 8, VOCAB_SIZE)
    history.begin(0, [3, 4])
    forward, chunks = Recording(lambda: None, torch.cat([logits, logits[:1]])), [Chunk(0, [4, 5, 9], 2)]
    found = Verifier(4, CPU, Repeats()).launch(forward, SampledStep(chunks, [1], columns, history)).wait()
    assert found.token_ids == [[5, 9, 5]]


def test_log_probabilities_are_those_of_the_lines_that_count() -> None:
    logits = torch.randn(4, VOCAB_SIZE, generator=torch.manual_seed(0))
    filtered = {"seed": 1, "logprobs": 3, "logprobs_mode": "processed", "top_k": 2, "temperature": 0.7}
    options = ({"temperature": 0, "logprobs": 2}, {"temperature": 0}, filtered)
    columns = SamplingColumns.of([SamplingParams(**each) for each in options], VOCAB_SIZE)
    chunks = [Chunk(0, [1, int(logits[0].argmax())], 1), Chunk(1, [1]), Chunk(2, [1])]
    forward = Recording(lambda: None, logits)
    step = SampledStep(chunks, [3] * 3, columns)
    found = Verifier(4, CPU, Repeats()).launch(forward, step).wait()
    expected = verify(logits, step)
    assert (found.token_ids, found.logprobs) == (expected.token_ids, expected.logprobs)
    assert [len(each) for each in found.logprobs] == [2, 0, 1]
