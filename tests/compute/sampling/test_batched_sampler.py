"""Claims about samplers of a batch, the definition's loop and the CPU's: each row gives the definition's token."""

import inspect
import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from jaxtyping import TypeCheckError
from torch import Tensor

import sampling_cases
from extent import IS_SHORT, slow_except
from infer.compute import ops
from infer.compute.sampling import sampler
from infer.compute.sampling.columns import SamplingColumns
from infer.compute.sampling.definition import process_logits, stages
from infer.compute.sampling.history import History
from infer.compute.sampling.sampler import NOT_A_NUMBER, NOTHING_ALLOWED, Choose, Sampled
from infer.errors import InvalidRequestError
from infer.sampling_params import SamplingParams
from sampling_cases import IMPLEMENTATIONS, INF, Row, batches_of_rows, make_batch, make_logits, same_bits

some = settings(max_examples=10 if IS_SHORT else 25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
many = settings(some, max_examples=25 if IS_SHORT else 50)
implementations = pytest.mark.parametrize("choose", IMPLEMENTATIONS.values(), ids=IMPLEMENTATIONS)

EVERYTHING = {"temperature": 0.8, "top_k": 50, "top_p": 0.9, "min_p": 0.02}
EVERYTHING |= {"repetition_penalty": 1.2, "frequency_penalty": 0.3, "presence_penalty": 0.2}

# Every parameter with a value that has an effect.
SINGLE = {"temperature": 0.5, "top_k": 3, "top_p": 0.5, "min_p": 0.3, "repetition_penalty": 1.5}
SINGLE |= {"frequency_penalty": 1.0, "presence_penalty": 1.0}
ON: dict[str, dict[str, Any]] = {
    **{name: {name: value} for name, value in SINGLE.items()},
    "repetition_window": {"repetition_penalty": 3.0, "repetition_window": 1},
    "logit_bias": {"logit_bias": {0: 4.0, 1: -INF}},
    "allowed_token_ids": {"allowed_token_ids": [1, 2]},
    "min_new_tokens": {"min_new_tokens": 50, "stop_token_ids": [0]},
    "temperature_last": {"temperature_last": True, "temperature": 0.5, "top_p": 0.5},
}
CONTEXT, NUM_PROMPT_TOKENS = (0, 1, 1, 2, 7, 7, 7), 3


def row(logits: Tensor, **values: Any) -> Row:
    return Row(logits, {"seed": 11} | values, CONTEXT, NUM_PROMPT_TOKENS)


def plain_logits(vocab_size: int = 40, seed: int = 0) -> Tensor:
    return make_logits("normal", vocab_size, seed)


def choose_from(choose: Choose, rows: Sequence[Row], end_ids: frozenset[int] = frozenset()) -> list[int]:
    tokens: list[int] = choose(*make_batch(rows, end_ids).arguments()).tolist()
    return tokens


# Against the reference

FIVE = torch.tensor([0.5, 0.2, 0.15, 0.1, 0.05]).log()
# Few draws show windows, prompts and counts of penalties, or the order of filters.
ORDERS: list[tuple[Any, ...]] = [({"repetition_penalty": 2.0, "repetition_window": 2}, (0, 1, 2))]
ORDERS += [({"frequency_penalty": 1.0}, (0, 0, 0, 1), 1), ({"top_p": 0.8, "min_p": 0.25},)]
ORDERS += [({"temperature": 2.0, "temperature_last": True, "top_p": 0.6},)]


@implementations
@many
@given(batches_of_rows())
@example(([Row(FIVE, values | {"seed": seed}, *rest) for seed in range(8) for values, *rest in ORDERS], frozenset()))
def test_each_row_of_a_batch_gets_the_references_token(choose: Choose, drawn: tuple[list[Row], frozenset[int]]) -> None:
    rows, end_ids = drawn
    assert choose_from(choose, rows, end_ids) == [sampling_cases.reference_token(each, end_ids) for each in rows]


@implementations
@settings(some, max_examples=5 if IS_SHORT else 15)
@given(batches_of_rows(max_rows=3, vocab_sizes=(16_383, 16_385, 20_011, 33_000)))
def test_rows_of_large_vocabularies_get_the_token_of_the_reference(
    choose: Choose, drawn: tuple[list[Row], frozenset[int]]
) -> None:
    """With more than 16,384 tokens, each group of the compiled sampler has more than one vector."""
    rows, end_ids = drawn
    assert choose_from(choose, rows, end_ids) == [sampling_cases.reference_token(each, end_ids) for each in rows]


REAL_SIZES = [(49_152, torch.float16), (49_152, torch.bfloat16), (262_144, torch.float32)]


@cache
def real_rows(vocab_size: int, dtype: torch.dtype) -> tuple[list[Row], list[int]]:
    """Return rows with usual parameters, and the reference's tokens."""
    draw = np.random.default_rng(vocab_size)
    context = tuple(draw.integers(0, vocab_size, 1000).tolist())
    bias = {int(i): float(draw.normal() * 5) for i in draw.integers(0, vocab_size, 20)}
    knobs: list[tuple[str, dict[str, Any]]] = [
        *(("normal", {"temperature": temperature}) for temperature in (0.0, 0.7)),
        *(("wide", {"top_k": 50, "top_p": 0.9}), ("ties", {"top_p": 0.9})),
        ("peaked", {"min_p": 0.05, "temperature": 1.5, "temperature_last": True}),
        ("normal", EVERYTHING | {"logit_bias": bias}),
        ("ties", {"top_k": 20_000, "repetition_penalty": 1.3, "repetition_window": 64}),
    ]
    rows = [
        Row(make_logits(style, vocab_size, seed).to(dtype), {"seed": seed << 40 | seed} | values, context, 500)
        for seed, (style, values) in enumerate(knobs)
    ]
    return rows, [sampling_cases.reference_token(each) for each in rows]


@implementations
@pytest.mark.parametrize(("vocab_size", "dtype"), slow_except(REAL_SIZES[:1], REAL_SIZES))
def test_real_vocabularies_get_the_tokens_of_the_reference(choose: Choose, vocab_size: int, dtype: torch.dtype) -> None:
    rows, expected = real_rows(vocab_size, dtype)
    assert choose_from(choose, rows) == expected


# Parameters that are off


def test_with_no_knob_in_use_no_step_is_run() -> None:
    for plain in (row(plain_logits()), row(plain_logits(), temperature=0)):
        assert [name for name, _ in sampling_cases.by_reference(stages, plain, frozenset())] == ["raw"]


def test_the_logits_stay_as_they_are() -> None:
    batch = make_batch([row(plain_logits(seed=i), **values) for i, values in enumerate(ON.values())])
    before = batch.logits.clone()
    for choose in IMPLEMENTATIONS.values():
        choose(*batch.arguments())
        assert same_bits(batch.logits, before)


# Independence of rows


@st.composite
def many_rows(draw: st.DrawFn) -> tuple[list[Row], list[int]]:
    """Draw 2 to 64 rows and an order of them."""
    count = draw(st.sampled_from([2, 3, 7, 16, 33, 64]))
    vocab_size = draw(st.sampled_from([1, 5, 33, 300]))
    pool = [*ON.values(), EVERYTHING, {}, {"temperature": 0.0}]
    if vocab_size <= 7:
        pool = [values for values in pool if not {"allowed_token_ids", "logit_bias", "stop_token_ids"} & set(values)]
    seed = draw(st.integers(0, 2**32 - 1))
    random = np.random.default_rng(seed)
    rows = []
    for index in range(count):
        values = pool[random.integers(len(pool))] | {
            "seed": int(random.integers(2**63)),
            "logprobs": None if random.random() < 0.3 else int(random.integers(0, 6)),
            "logprobs_mode": "processed" if random.random() < 0.5 else "raw",
        }
        context = tuple(random.integers(0, min(vocab_size, 9), random.integers(0, 12)).tolist())
        style = str(random.choice(sampling_cases.STYLES))
        rows.append(Row(make_logits(style, vocab_size, seed + index), values, context))
    return rows, draw(st.permutations(range(count)))


def taken(sampled: Sampled, index: int, count: int) -> list[Tensor]:
    """Return all results of a row, with as many alternatives as it requested."""
    columns = [sampled.token_ids, sampled.logprobs, sampled.ranks]
    tops = [sampled.top_ids, sampled.top_logprobs]
    found = [x[index : index + 1] for x in columns if x is not None] + [x[index, :count] for x in tops if x is not None]
    assert len(found) == 5
    return found


@implementations
@some
@given(many_rows())
def test_a_row_has_equal_bits_alone_in_any_batch_and_order(choose: Choose, drawn: tuple[list[Row], list[int]]) -> None:
    rows, order = drawn
    together = sampler.sample(*make_batch(rows).arguments(), choose=choose)
    moved = sampler.sample(*make_batch([rows[i] for i in order]).arguments(), choose=choose)
    assert torch.equal(moved.token_ids, together.token_ids[torch.tensor(order)])
    for place, index in enumerate(order[:12]):
        alone = sampler.sample(*make_batch([rows[index]]).arguments(), choose=choose)
        count = rows[index].params.logprobs
        if count is None:
            assert int(alone.token_ids[0]) == int(together.token_ids[index])
            continue
        count = min(count, len(rows[index].logits))
        expected = taken(alone, 0, count)
        for found in (taken(together, index, count), taken(moved, place, count)):
            assert all(map(same_bits, found, expected))


@pytest.mark.slow
def test_log_probabilities_do_not_depend_on_threads_or_neighbours() -> None:
    """A float sum over 49,152 entries would: torch divides one row between threads, and many rows by rows."""
    logits = torch.stack([make_logits("normal", 49_152, seed) for seed in range(16)])
    token_ids = torch.arange(16)
    expected = sampler.log_probabilities(logits, token_ids, 3)
    before = torch.get_num_threads()
    try:
        for num_threads, index in product((1, 2, 4), range(0, 16, 5)):
            torch.set_num_threads(num_threads)
            found = sampler.log_probabilities(logits[index : index + 1], token_ids[index : index + 1], 3)
            assert all(same_bits(a[0], b[index]) for a, b in zip(found, expected, strict=True))
    finally:
        torch.set_num_threads(before)


# Rows that fail


BANNED_3 = plain_logits().index_fill(0, torch.tensor([3]), -INF)
FAILING: dict[str, tuple[Row, int]] = {
    "NaN": (row(torch.cat([plain_logits(39), torch.tensor([math.nan])])), NOT_A_NUMBER),
    "NaN in a greedy row": (row(torch.full((40,), math.nan), temperature=0), NOT_A_NUMBER),
    "+inf": (row(torch.cat([torch.tensor([INF]), plain_logits(39)]), top_p=0.5), NOT_A_NUMBER),
    "NaN where nothing is allowed": (row(torch.full((40,), math.nan), allowed_token_ids=[3]), NOT_A_NUMBER),
    "all −inf": (row(torch.full((40,), -INF), **EVERYTHING), NOTHING_ALLOWED),
    "bias": (row(plain_logits(), logit_bias=dict.fromkeys(range(40), -INF)), NOTHING_ALLOWED),
    "allowed id that the row bans": (row(BANNED_3, allowed_token_ids=[3], temperature=0), NOTHING_ALLOWED),
    "grammar": (replace(row(plain_logits(), top_k=4), allowed=frozenset()), NOTHING_ALLOWED),
    "two masks": (replace(row(plain_logits(), allowed_token_ids=[1]), allowed=frozenset([2])), NOTHING_ALLOWED),
}


@implementations
@pytest.mark.parametrize("fault", FAILING)
def test_a_row_that_cannot_be_sampled_fails_alone_with_its_code(choose: Choose, fault: str) -> None:
    bad, code = FAILING[fault]
    good = [row(plain_logits(seed=i), **values) for i, values in enumerate(ON.values())]
    rows = [*good[:5], bad, *good[5:], bad]
    tokens = choose_from(choose, rows)
    expected = choose_from(choose, good)
    assert tokens == [*expected[:5], code, *expected[5:], code]
    assert choose_from(choose, [bad]) == [code]
    assert sampling_cases.reference_token(bad) == code
    assert ("nothing is sampled" if code == NOT_A_NUMBER else "no token of this row") in sampler.message_of(code)


# The rules of the documentation


PENALTIES = ("repetition", "frequency", "presence")


def test_the_steps_come_in_the_numbered_order() -> None:
    values = {name: value for each in ON.values() for name, value in each.items()}
    names = [name for name, _ in sampling_cases.by_reference(stages, row(plain_logits(), **values), frozenset())]
    expected = ["raw", "allowed", "logit_bias", "min_new_tokens", *(f"{x}_penalty" for x in PENALTIES)]
    assert names == [*expected, "top_k", "top_p", "min_p", "temperature_last"]
    values = {"temperature": 0.5, "top_k": 3}
    names = [name for name, _ in sampling_cases.by_reference(stages, row(plain_logits(), **values), frozenset())]
    assert names == ["raw", "temperature", "top_k"]


@implementations
def test_the_minimum_length_is_lifted_where_masks_and_bias_leave_nothing_but_the_end(choose: Choose) -> None:
    finished = replace(row(plain_logits(), min_new_tokens=50), allowed=frozenset([3]))
    biased = row(plain_logits(), min_new_tokens=50, logit_bias={3: INF})
    going_on = replace(finished, allowed=frozenset([3, 4]))
    assert choose_from(choose, [finished, biased, going_on], frozenset([3])) == [3, 3, 4]


@pytest.mark.parametrize("choose", [sampler.choose_tokens, ops.choose_tokens], ids=IMPLEMENTATIONS)
def test_lifted_ends_are_filtered_at_any_temperature(choose: Choose) -> None:
    ends = row(torch.tensor([0.4, 0.3, 5.0]), min_new_tokens=50, temperature=1e-37, min_p=0.05, top_k=2)
    ends = replace(ends, allowed=frozenset([0, 1]), context=(), num_prompt_tokens=0)
    assert choose_from(choose, [ends], frozenset([0, 1])) == [0]


def test_a_temperature_shifts_a_row_only_where_its_largest_logit_would_overflow() -> None:
    near, over = torch.tensor([1.0, 0.5, -3e38]), torch.tensor([1e10, 9e9, -3e38])
    near, over = (process_logits(logits, [], SamplingParams(temperature=1e-30)) for logits in (near, over))
    assert near[:2].tolist() == (torch.tensor([1.0, 0.5]) / torch.tensor(1e-30)).tolist()
    assert over[0] == 0
    assert torch.stack([near, over]).isfinite().all()


def test_top_p_counts_integer_weights_so_that_an_order_of_equal_probabilities_does_not_matter() -> None:
    """The floating-point sum depends on the order of additions. The sum of integers does not."""
    from infer.compute.sampling.noise import weights

    logits = make_logits("normal", 262_144, 1)
    all_weights = weights(logits, logits.max())
    assert all_weights.dtype == torch.int64
    assert int(all_weights.max()) == 1 << 42
    assert torch.equal(all_weights.sum(), all_weights.flip(0).cumsum(0)[-1])
    exact = (logits.double() - logits.max().double()).exp()
    assert float((all_weights.double() / 2**42 - exact).abs().max()) < 2.0**-42


# Log-probabilities


@some
@given(batches_of_rows(), st.integers(0, 20))
def test_log_probabilities_are_those_of_the_softmax(drawn: tuple[list[Row], frozenset[int]], count: int) -> None:
    rows, end_ids = drawn
    rows = [sampling_cases.asking(each, count, ("raw", "processed")[index % 2]) for index, each in enumerate(rows)]
    sampled = sampler.sample(*make_batch(rows, end_ids).arguments())
    for index, each in enumerate(rows):
        token_id = int(sampled.token_ids[index])
        if token_id < 0:
            continue
        scored = sampling_cases.reference_logits(each, end_ids) if index % 2 else each.logits.float()
        assert scored is not None
        entry = sampled.logprob_of(index, min(count, len(scored)))
        exact = scored.double().log_softmax(0)
        ranked = sorted(range(len(scored)), key=lambda i: (-float(scored[i]), i))
        assert entry.token_id == token_id
        assert entry.rank == ranked.index(token_id) + 1
        assert [i for i, _ in entry.top] == ranked[:count]
        for found, i in [(entry.logprob, token_id), *((logprob, i) for i, logprob in entry.top)]:
            assert found == pytest.approx(float(exact[i].float()), rel=1e-6, abs=1e-6)


def test_log_probabilities_are_within_a_millionth_at_the_largest_vocabulary() -> None:
    for style in ("normal", "constant", "peaked"):
        logits = make_logits(style, 262_144, 9)[None]
        found, *_ = sampler.log_probabilities(logits, logits.argmax(-1), 0)
        assert float(found[0]) == pytest.approx(float(logits.double().log_softmax(-1).max()), abs=1e-6)


def test_without_a_request_there_are_no_log_probabilities() -> None:
    sampled = sampler.sample(*make_batch([row(plain_logits())]).arguments())
    assert (sampled.logprobs, sampled.ranks, sampled.top_ids, sampled.top_logprobs) == (None, None, None, None)


# Grammar masks and shapes


@implementations
@some
@given(st.data())
def test_a_packed_mask_allows_exactly_its_bits(choose: Choose, data: st.DataObject) -> None:
    vocab_size = data.draw(st.sampled_from([1, 31, 32, 33, 64, 95]))
    allowed = data.draw(st.frozensets(st.integers(0, vocab_size - 1), min_size=1))
    each = Row(make_logits("normal", vocab_size, 1), {"seed": 1}, allowed=allowed)
    assert choose_from(choose, [each])[0] in allowed


@implementations
def test_bits_beyond_the_vocabulary_count_for_nothing(choose: Choose) -> None:
    batch = make_batch([Row(plain_logits(33), {"temperature": 0}, allowed=frozenset([1]))])
    for word, expected in ((-2, NOTHING_ALLOWED), (-1, 32)):  # ids 33 to 63, and 32 too
        mask = torch.tensor([[0, word]], dtype=torch.int32)
        assert choose(*with_changes(batch, allowed=mask)).tolist() == [expected]


def with_changes(batch: sampling_cases.Batch, **changes: Any) -> tuple[Any, ...]:
    return replace(batch, **changes).arguments()


PENALISED = make_batch([row(plain_logits(), **EVERYTHING)] * 2)
WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "a row too few": ({"logits": PENALISED.logits[:1]}, r"got \[1, 40\]"),
    "a token too many": ({"logits": torch.zeros(2, 41)}, r"logits must be \[2, 40\] for 2 rows, got \[2, 41\]"),
    "integers": ({"logits": torch.zeros(2, 40, dtype=torch.int64)}, "logits must be floats, got torch.int64"),
    "positions": ({"positions": torch.zeros(3, dtype=torch.int64)}, r"positions must be \[2\] for 2 rows, got \[3\]"),
    "a mask of a word too many": ({"allowed": torch.zeros(2, 3).int()}, r"allowed must be \[2, 2\] .*, got \[2, 3\]"),
    "a mask of int64": ({"allowed": torch.zeros(2, 2, dtype=torch.int64)}, "allowed must be int32, one bit per token"),
    "no history": ({"history": None}, "rows with a penalty need a history of 40 words, got None"),
    "a history of another vocabulary": ({"history": History(2, 9, 41)}, "need a history of 40 words, got 41"),
}


@pytest.mark.parametrize("fault", WRONG)
def test_a_wrong_shape_is_an_error_that_names_it(fault: str) -> None:
    changes, message = WRONG[fault]
    with pytest.raises(InvalidRequestError, match=message):
        inspect.unwrap(sampler.check_shapes)(*with_changes(PENALISED, **changes))
    with pytest.raises((InvalidRequestError, TypeCheckError)):
        ops.sample(*with_changes(PENALISED, **changes))


def test_no_rows_is_no_work() -> None:
    empty = SamplingColumns.of([], 5)
    assert sampler.choose_tokens(torch.zeros(0, 5), empty, None, torch.zeros(0, dtype=torch.int64)).tolist() == []
