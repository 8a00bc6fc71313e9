"""Log-probabilities of compiled code in a recorded step have the bits of the definition in torch."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from infer.compute.backends.cpu.capture.sampled import Verifier
from infer.compute.backends.cpu.thread_records import STATE
from infer.compute.backends.cpu.threads.dispatch_table import DispatchTable
from infer.compute.backends.cpu.threads.pool import aligned
from infer.compute.operands.step import Chunk, Masks
from infer.compute.ops import SampledStep
from infer.compute.sampling import sampler
from infer.compute.sampling.columns import SamplingColumns
from infer.outputs import TokenLogprob
from infer.sampling_params import SamplingParams
from path_cases import CASES, Outcome, Way, World, all_by_definition, make_sequence, run_all
from sampling_cases import STYLES, Row, asking, batches_of_rows, make_batch, make_logits

KNOBS: list[dict[str, Any]] = [
    *({"temperature": 0.0, "repetition_penalty": penalty} for penalty in (1.0, 1.4)),
    *({"temperature": temperature} for temperature in (1.0, 0.3)),
    {"temperature": 1.7, "top_p": 0.7, "temperature_last": True},
    {"top_k": 5},
    {"top_k": 40, "top_p": 0.8, "min_p": 0.05},
    {"min_p": 0.1, "frequency_penalty": 0.8},
    {"logit_bias": {0: 3.0, 2: -math.inf}, "min_new_tokens": 9, "stop_token_ids": [1]},
    {"allowed_token_ids": [0, 3, 5]},
]
CONTEXT = (1, 2, 2, 6, 1)


def sampled_by_table(
    rows: Sequence[Row], end_ids: frozenset[int] = frozenset(), num_threads: int = 2
) -> list[list[TokenLogprob]]:
    """Return the results of the commands after a forward, one per line."""
    batch = make_batch(rows, end_ids)
    logits, state, masks = batch.logits.float().clone(), aligned(1, STATE), None
    if batch.allowed is not None:
        masks = Masks(batch.allowed, np.ones(1, np.int64), lambda: None, lambda *step: False)
    chunks, starts = [Chunk(slot, [0]) for slot in range(len(rows))], [len(row.context) - 1 for row in rows]
    verifier = Verifier(DispatchTable([]), logits)
    return verifier.run(state, SampledStep(chunks, starts, batch.columns, batch.history, masks), num_threads).logprobs


def defined(rows: Sequence[Row], end_ids: frozenset[int] = frozenset()) -> list[list[TokenLogprob]]:
    sampled = sampler.sample(*make_batch(rows, end_ids).arguments())
    counts = [row.params.logprobs for row in rows]
    return [
        [] if count is None or int(sampled.token_ids[index]) < 0 else [sampled.logprob_of(index, count)]
        for index, count in enumerate(counts)
    ]


@pytest.mark.slow
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(batches_of_rows(), st.integers(1, 3), st.data())
def test_every_row_has_the_bits_of_the_definition(
    drawn: tuple[list[Row], frozenset[int]], num_threads: int, data: st.DataObject
) -> None:
    rows, end_ids = drawn
    counts, modes = st.none() | st.integers(0, 20), st.sampled_from(["raw", "processed"])
    rows = [asking(row, data.draw(counts), data.draw(modes)) for row in rows]
    if all(row.params.logprobs is None for row in rows):
        rows[0] = asking(rows[0], 20, "processed")
    assert sampled_by_table(rows, end_ids, num_threads) == defined(rows, end_ids)


@pytest.mark.slow(cases=1)
@pytest.mark.parametrize(("vocab_size", "mode"), [(7, "raw"), (257, "processed"), (257, "raw"), (20_011, "processed")])
def test_every_style_of_logits_and_every_filter_has_the_bits_of_the_definition(mode: str, vocab_size: int) -> None:
    rows = [
        asking(Row(make_logits(style, vocab_size, index), {"seed": 7} | knobs, CONTEXT, 2), 20, mode)
        for index, style in enumerate(STYLES)
        for knobs in KNOBS[index % 2 :: 2]
    ]
    expected = defined(rows)
    for num_threads in (1, 3):
        assert sampled_by_table(rows, num_threads=num_threads) == expected
    assert [sampled_by_table([row])[0] for row in rows[::5]] == expected[::5]


@pytest.mark.parametrize("mode", ["raw", "processed"])
def test_a_row_that_fails_has_none_and_its_neighbours_theirs(mode: str) -> None:
    good = [asking(Row(make_logits("normal", 300, seed), {"seed": seed}), 5, mode) for seed in range(3)]
    for fault in (math.nan, math.inf):
        bad = asking(Row(make_logits("normal", 300, 9).index_fill(0, torch.tensor([77]), fault), {"seed": 1}), 5, mode)
        banned = asking(Row(make_logits("normal", 300, 9), {"seed": 1, "allowed_token_ids": [4]}), 5, mode)
        banned = replace(banned, allowed=frozenset([5]))
        expected = defined(good)
        found = sampled_by_table([good[0], bad, good[1], banned, good[2]])
        assert found == [expected[0], [], expected[1], [], expected[2]]


def test_each_line_of_a_verified_step_has_its_own() -> None:
    """A row has two right drafts and a wrong one, and another row has no drafts."""
    lines = torch.stack([make_logits("normal", 300, seed) for seed in range(5)])
    params = [SamplingParams(temperature=0, logprobs=3), SamplingParams(temperature=0, logprobs=20)]
    best = lines.argmax(-1).tolist()
    chunks = [Chunk(0, [0, best[0], best[1], best[2] + 1], num_drafts=3), Chunk(1, [0])]
    verifier = Verifier(DispatchTable([]), lines.clone())
    found = verifier.run(aligned(1, STATE), SampledStep(chunks, [0, 0], SamplingColumns.of(params, 300)), 2)
    assert found.token_ids == [best[:3], best[4:]]
    rows = [Row(line, {"temperature": 0, "logprobs": 3}) for line in lines[:3]]
    rows.append(Row(lines[4], {"temperature": 0, "logprobs": 20}))
    *first, last = defined(rows)
    assert found.logprobs == [[each for line in first for each in line], last]


def test_a_row_with_log_probabilities_ends_no_multi_step(world: World) -> None:
    params = SamplingParams(temperature=0.8, seed=5, max_new_tokens=40, ignore_eos=True)
    case = replace(CASES[0], params=params)
    stats = []
    for asked in ({}, {"logprobs": 20}, {"logprobs": 3, "logprobs_mode": "processed", "top_p": 0.9}):
        cases = [case, replace(case, params=replace(params, **asked))]  # type: ignore[arg-type]
        results = run_all(world, [make_sequence(world, each, Way()) for each in cases], Way(), 2)
        assert [Outcome.of(result) for result in results] == all_by_definition(world, cases)
        stats.append([(result.stats.multi_steps, result.stats.multi_step_tokens) for result in results])
    assert stats[0] == stats[1] == stats[2]
    assert stats[0][0][0] > 0
