"""The checks are checked: each planted fault makes the check fail that is there to catch it, and no other fault hides.

A check here is a short form of a test beside it (the file is named with it): the same comparison, on fixed rows.
"""

from collections.abc import Callable
from copy import copy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from infer.sampling import noise, sampler
from infer.sampling.columns import SamplingColumns
from infer.sampling.history import History
from infer.sampling.integer_probs import target, weights
from sampling_cases import (
    INF,
    STYLES,
    Row,
    make_batch,
    make_logits,
    reference_logits,
    reference_token,
    same_bits,
    tables,
    tables_of,
)
from sampling_statistics import CONFIGURATIONS, draw_tokens, exact_distribution, goodness_of_fit, independence

Patch = pytest.MonkeyPatch
FALSE_ALARM = 1e-6
VOCAB, ENDS = 40, frozenset([5])
KNOBS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.0, "repetition_penalty": 1.3},
    {"temperature": 0.5},
    {"top_k": 3},
    {"top_p": 0.6},
    {"top_k": 4, "top_p": 0.7},
    {"top_p": 0.8, "min_p": 0.4, "top_k": 5},
    {"min_p": 0.2},
    {"repetition_penalty": 1.5, "repetition_window": 2},
    {"frequency_penalty": 0.7},
    {"presence_penalty": -1.5},
    {"temperature": 2.0, "top_p": 0.6, "temperature_last": True},
    {"logit_bias": {3: 5.0, 0: -INF}},
    {"logit_bias": {3: INF, 7: INF}},
    {"allowed_token_ids": [0, 31, 32, 39]},
    {"min_new_tokens": 6, "stop_token_ids": [1]},
    {"min_new_tokens": 7, "stop_token_ids": [1]},
    {"temperature": 2.0, "top_p": 0.6, "min_p": 0.3},
]


def fixed_rows() -> list[Row]:
    random = np.random.default_rng(1)
    rows = []
    for index, style in enumerate(STYLES):
        for values in KNOBS:
            context = tuple(random.integers(0, 8, 12).tolist())
            seed = int(random.integers(2**63)) * 2 + 1
            rows.append(Row(make_logits(style, VOCAB, index), {"seed": seed} | values, context, 6))
    return rows


ROWS = fixed_rows()
LOGITS = [reference_logits(row, ENDS) for row in ROWS]
TOKENS = [reference_token(row, ENDS) for row in ROWS]


# The checks


def check_processed() -> None:
    """test_batched_sampler: a row is processed as the reference does it alone"""
    for found, expected in zip(sampler.process(*make_batch(ROWS, ENDS).arguments()), LOGITS, strict=True):
        assert expected is None or same_bits(found, expected)


def check_tokens() -> None:
    """test_batched_sampler: a row gets the token of the reference"""
    assert sampler.choose_tokens(*make_batch(ROWS, ENDS).arguments()).tolist() == TOKENS


def check_independent_rows() -> None:
    """test_batched_sampler: a row alone and in any batch has the same bits"""
    rows = [replace(row, values={**row.values, "logprobs": 2}) for row in ROWS[::5]]
    together = sampler.sample(*make_batch(rows, ENDS).arguments())
    assert together.logprobs is not None
    for index, row in enumerate(rows):
        alone = sampler.sample(*make_batch([row], ENDS).arguments())
        assert alone.logprobs is not None
        assert int(alone.token_ids[0]) == int(together.token_ids[index])
        assert same_bits(alone.logprobs[0], together.logprobs[index])


def check_failing_rows() -> None:
    """test_batched_sampler: a row that cannot be sampled fails alone with its code"""
    bad = Row(torch.full((VOCAB,), torch.nan), {"seed": 1})
    banned = Row(make_logits("normal", VOCAB, 0), {"seed": 1, "logit_bias": dict.fromkeys(range(VOCAB), -INF)})
    batch = make_batch([ROWS[0], bad, ROWS[1], banned], ENDS)
    assert sampler.choose_tokens(*batch.arguments()).tolist() == [TOKENS[0], -1, TOKENS[1], -2]


def check_log_probabilities() -> None:
    """test_batched_sampler: log-probabilities are those of the softmax"""
    logits = torch.stack([make_logits(style, VOCAB, 1) for style in STYLES])
    found, ranks, *_ = sampler.log_probabilities(logits, torch.full((len(STYLES),), 3), 2)
    assert torch.allclose(found, logits.double().log_softmax(-1)[:, 3].float(), rtol=1e-6, atol=1e-6)
    ahead = [sorted(range(VOCAB), key=lambda i: (-float(row[i]), i)).index(3) for row in logits]
    assert ranks.tolist() == [count + 1 for count in ahead]


def check_history() -> None:
    """test_history: the tables say what a list of ids says"""
    history, ids = History(2, 30, 8), [1, 2, 4, 3, 1]
    history.begin(0, ids, 2)
    history.begin(1, ids, 5)
    slots = torch.arange(2)
    for token_id in (1, 7, 1):
        history.append(slots, torch.full((2,), token_id))
    for slot, prompt in enumerate((2, 5)):
        assert tables(history, slot) == tables_of([*ids, 1, 7, 1], prompt, 8)
    within = history.is_within(slots, torch.full((2,), 5))
    assert within.tolist() == [[token_id in (3, 1, 7) for token_id in range(8)]] * 2


def check_fit() -> None:
    """test_sampler_statistics: draws follow the exact distribution (20,000 of them here)"""
    for name in ("plain", "hot", "penalties", "everything"):
        logits = make_logits("normal", 50, 1) / 2
        tokens = draw_tokens(sampler.choose_tokens, logits, CONFIGURATIONS[name], 1000, 20)
        assert goodness_of_fit(tokens, exact_distribution(logits, CONFIGURATIONS[name])) > FALSE_ALARM


def check_independent_draws() -> None:
    """test_sampler_statistics: neighbouring positions, rows and seeds are independent"""
    logits = make_logits("normal", 12, 3) / 4
    probabilities = exact_distribution(logits, {})
    tokens = draw_tokens(sampler.choose_tokens, logits, {}, 801, 26)
    far = draw_tokens(sampler.choose_tokens, logits, {}, 801, 26, first_seed=2**32)
    for first, second in [
        (tokens[:, :-1], tokens[:, 1:]),
        (tokens[:-1], tokens[1:]),
        (tokens[:-1, 1:], tokens[1:, :-1]),
        (tokens, far),
    ]:
        assert independence(first, second, probabilities) > FALSE_ALARM


CHECKS: list[Callable[[], None]] = [
    check_processed,
    check_tokens,
    check_independent_rows,
    check_failing_rows,
    check_log_probabilities,
    check_history,
    check_fit,
    check_independent_draws,
]


# The faults


def set_gumbel(patch: Patch, gumbel: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
    patch.setattr(sampler, "gumbel_rows", gumbel)


def noise_of_the_position_before(patch: Patch) -> None:
    original = noise.gumbel_rows
    set_gumbel(patch, lambda seeds, positions, ids: original(seeds, positions - 1, ids))


def noise_of_half_the_seed(patch: Patch) -> None:
    original = noise.gumbel_rows
    set_gumbel(patch, lambda seeds, positions, ids: original(seeds & 0xFFFFFFFF, positions, ids))


def noise_of_seed_plus_position(patch: Patch) -> None:
    original = noise.gumbel_rows
    set_gumbel(patch, lambda seeds, positions, ids: original(seeds + positions, torch.zeros_like(positions), ids))


def noise_without_the_position(patch: Patch) -> None:
    original = noise.gumbel_rows
    set_gumbel(patch, lambda seeds, positions, ids: original(seeds, torch.zeros_like(positions), ids))


def noise_of_the_first_row(patch: Patch) -> None:
    original = noise.gumbel_rows
    set_gumbel(patch, lambda seeds, positions, ids: original(seeds[:1].expand_as(seeds), positions, ids))


def noise_that_is_too_small(patch: Patch) -> None:
    original = noise.gumbel_rows
    set_gumbel(patch, lambda seeds, positions, ids: original(seeds, positions, ids) * 0.95)


def normal_noise(patch: Patch) -> None:
    """Standard normal in place of Gumbel, from the same uniforms."""
    original = noise.gumbel_rows

    def gumbel(seeds: Tensor, positions: Tensor, ids: Tensor) -> Tensor:
        return torch.special.ndtri(
            (-(-original(seeds, positions, ids).double()).exp()).exp().clamp(1e-12, 1 - 1e-12)
        ).float()

    set_gumbel(patch, gumbel)


def history_without_window(patch: Patch) -> None:
    patch.setattr(History, "is_within", lambda self, slots, windows: self.last[slots] > 0)


def window_one_too_long(patch: Patch) -> None:
    original = History.is_within
    patch.setattr(History, "is_within", lambda self, slots, windows: original(self, slots, windows + 1))


def counts_of_the_prompt_too(patch: Patch) -> None:
    original = History.begin
    patch.setattr(History, "begin", lambda self, slot, ids, prompt=None: original(self, slot, ids, 0))


def set_penalty(patch: Patch, name: str, apply: Callable[[Tensor, SamplingColumns, History], Tensor]) -> None:
    patch.setitem(sampler._PENALTIES, name, apply)


def penalty_that_always_divides(patch: Patch) -> None:
    def apply(x: Tensor, columns: SamplingColumns, history: History) -> Tensor:
        mine = columns.penalised
        is_within = history.is_within(columns.history_slot[mine], columns.repetition_window[mine])
        return x.index_copy(0, mine, torch.where(is_within, x[mine] / columns.repetition_penalty[mine, None], x[mine]))

    set_penalty(patch, "repetition_penalty", apply)


def frequency_that_counts_once(patch: Patch) -> None:
    original = sampler.apply_frequency_penalty

    def apply(x: Tensor, columns: SamplingColumns, history: History) -> Tensor:
        once = History(history.num_slots, history.capacity, history.vocab_size)
        once.counts.copy_(history.counts.clamp(max=1))
        return original(x, columns, once)

    set_penalty(patch, "frequency_penalty", apply)


def top_k_that_keeps_ties(patch: Patch) -> None:
    def keep(x: Tensor, columns: SamplingColumns) -> Tensor:
        k = torch.where(columns.temperature != 0, columns.top_k, 0)
        threshold = x.topk(columns.max_top_k).values.gather(1, (k - 1).clamp(min=0)[:, None])
        return x.masked_fill((x < threshold) & (k > 0)[:, None], -INF)

    patch.setattr(sampler, "keep_top_k", keep)


def top_k_ties_by_descending_id(patch: Patch) -> None:
    original = sampler.keep_top_k
    patch.setattr(sampler, "keep_top_k", lambda x, columns: original(x.flip(-1), columns).flip(-1))


def top_p_ties_by_descending_id(patch: Patch) -> None:
    original = sampler.keep_top_p
    patch.setattr(sampler, "keep_top_p", lambda x, columns: original(x.flip(-1), columns).flip(-1))


def top_p_that_drops_the_crossing_token(patch: Patch) -> None:
    patch.setattr(sampler, "target", lambda total, p: target(total, p) * 0.8)


def top_p_not_renormalised(patch: Patch) -> None:
    """Its share is of all probability, that of tokens which top-k dropped included."""
    totals: list[Tensor] = []
    top_k, top_p = sampler.keep_top_k, sampler.keep_top_p

    def keep_top_k(x: Tensor, columns: SamplingColumns) -> Tensor:
        totals.append(weights(x, x.max(-1).values).sum(-1))
        return top_k(x, columns)

    def keep_top_p(x: Tensor, columns: SamplingColumns) -> Tensor:
        whole = totals[-1][columns.with_top_p] if totals else None
        patch.setattr(sampler, "target", lambda total, p: target(total if whole is None else whole, p))
        return top_p(x, columns)

    patch.setattr(sampler, "keep_top_k", keep_top_k)
    patch.setattr(sampler, "keep_top_p", keep_top_p)


def min_p_before_top_p(patch: Patch) -> None:
    top_p, min_p = sampler.keep_top_p, sampler.keep_min_p
    patch.setattr(sampler, "keep_top_p", lambda x, columns: top_p(min_p(x, columns), columns))


def min_p_of_the_absolute_probability(patch: Patch) -> None:
    def keep(x: Tensor, columns: SamplingColumns) -> Tensor:
        lowest = torch.where(columns.temperature != 0, columns.log_min_p, -INF)[:, None]
        return x.masked_fill(x.log_softmax(-1) < lowest, -INF)

    patch.setattr(sampler, "keep_min_p", keep)


def temperature_last_ignored(patch: Patch) -> None:
    original = sampler.stages

    def stages(logits: Tensor, columns: SamplingColumns, *others: Any) -> Any:
        changed = copy(columns)
        changed.temperature_last = torch.zeros_like(columns.temperature_last)
        changed._host = columns._host | {"temperature_last": np.zeros(len(columns), np.bool_)}
        return original(logits, changed, *others)

    patch.setattr(sampler, "stages", stages)


def temperature_that_multiplies(patch: Patch) -> None:
    original = sampler.apply_temperature
    patch.setattr(sampler, "apply_temperature", lambda x, t: original(x, torch.where(t == 0, t, 1 / t)))


def masks_with_the_highest_bit_first(patch: Patch) -> None:
    original = sampler.unpack_bits

    def unpack(words: Tensor, vocab_size: int) -> Tensor:
        bits = original(words, words.shape[-1] * 32)
        return bits.view(*words.shape, 32).flip(-1).flatten(-2)[..., :vocab_size]

    patch.setattr(sampler, "unpack_bits", unpack)


def ends_banned_once_too_often(patch: Patch) -> None:
    original = sampler.ban_ends
    patch.setattr(sampler, "ban_ends", lambda x, columns, positions: original(x, columns, positions - 1))


def bias_of_the_row_before(patch: Patch) -> None:
    original = sampler.apply_logit_bias

    def apply(x: Tensor, columns: SamplingColumns) -> Tensor:
        return original(x.roll(1, 0), columns).roll(-1, 0)

    patch.setattr(sampler, "apply_logit_bias", apply)


def nan_that_spreads(patch: Patch) -> None:
    original = sampler.process
    patch.setattr(sampler, "process", lambda logits, *others: original(logits, *others) + logits.max() * 0)


def no_code_for_a_row_without_tokens(patch: Patch) -> None:
    patch.setattr(sampler, "NOTHING_ALLOWED", 0)


def normaliser_of_the_largest_alone(patch: Patch) -> None:
    patch.setattr(sampler, "weights", lambda logits, largest: weights(logits, largest) * (logits == largest[:, None]))


def rank_by_descending_id(patch: Patch) -> None:
    original = sampler.log_probabilities

    def log_probabilities(logits: Tensor, token_ids: Tensor, count: int) -> Any:
        logprobs, _, *top = original(logits, token_ids, count)
        _, ranks, *_ = original(logits.flip(-1), logits.shape[1] - 1 - token_ids, count)
        return logprobs, ranks, *top

    patch.setattr(sampler, "log_probabilities", log_probabilities)


FAULTS: dict[Callable[[Patch], None], set[Callable[[], None]]] = {
    noise_of_the_position_before: {check_tokens},
    noise_of_half_the_seed: {check_tokens, check_independent_draws},
    noise_of_seed_plus_position: {check_tokens, check_independent_draws},
    noise_without_the_position: {check_tokens, check_independent_draws},
    noise_of_the_first_row: {check_tokens, check_independent_rows, check_independent_draws},
    noise_that_is_too_small: {check_tokens, check_fit},
    normal_noise: {check_tokens, check_fit},
    history_without_window: {check_processed, check_history},
    window_one_too_long: {check_processed, check_history},
    counts_of_the_prompt_too: {check_processed, check_history},
    penalty_that_always_divides: {check_processed, check_fit},
    frequency_that_counts_once: {check_processed, check_fit},
    top_k_that_keeps_ties: {check_processed},
    top_k_ties_by_descending_id: {check_processed},
    top_p_ties_by_descending_id: {check_processed},
    top_p_that_drops_the_crossing_token: {check_processed},
    top_p_not_renormalised: {check_processed},
    min_p_before_top_p: {check_processed},
    min_p_of_the_absolute_probability: {check_processed},
    temperature_last_ignored: {check_processed},
    temperature_that_multiplies: {check_processed, check_fit},
    masks_with_the_highest_bit_first: {check_processed},
    ends_banned_once_too_often: {check_processed},
    bias_of_the_row_before: {check_processed, check_independent_rows},
    nan_that_spreads: {check_failing_rows},
    no_code_for_a_row_without_tokens: {check_failing_rows},
    normaliser_of_the_largest_alone: {check_log_probabilities},
    rank_by_descending_id: {check_log_probabilities},
}


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_without_a_fault_a_check_passes(check: Callable[[], None]) -> None:
    check()


@pytest.mark.parametrize("plant", FAULTS, ids=lambda plant: plant.__name__)
def test_a_planted_fault_is_caught(plant: Callable[[Patch], None], monkeypatch: Patch) -> None:
    plant(monkeypatch)
    for check in FAULTS[plant]:
        with pytest.raises(AssertionError):
            check()


def test_every_check_catches_a_fault() -> None:
    assert set().union(*FAULTS.values()) == set(CHECKS)
