"""Claims about the single-row sampler: each stage, their order, ties, stages that are off, and errors."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from jaxtyping import TypeCheckError
from torch import Tensor

import infer
from cases import cases
from extent import IS_SHORT
from infer import InferError, InvalidRequestError, SamplingParams, sample_token
from infer.compute.sampling import definition, row_stages
from infer.compute.sampling.definition import LogitsError, log_probabilities, process_logits
from infer.compute.sampling.row_stages import FILTERS, keep_allowed
from sampling_cases import INF, kept_ids, same_bits

few = settings(max_examples=12 if IS_SHORT else 25, deadline=None)

logit_values = st.one_of(
    st.floats(-30, 30, width=16), st.sampled_from([0.0, -0.0, 1.0, -1.0, -INF, 3e38, -3e38]), st.just(2.0)
)
rows = st.lists(logit_values, min_size=1, max_size=40).map(torch.tensor)
live_rows = rows.filter(lambda row: bool((row > -INF).any()))

# Every stage with an active value, as a function of only a row.
STAGES: dict[str, Callable[[Tensor], Tensor]] = {
    "temperature": lambda row: infer.apply_temperature(row, 0.7),
    "tiny temperature": lambda row: infer.apply_temperature(row, 1e-300),
    "top_k": lambda row: infer.apply_top_k(row, 3),
    "top_p": lambda row: infer.apply_top_p(row, 0.8),
    "min_p": lambda row: infer.apply_min_p(row, 0.1),
    "repetition": lambda row: infer.apply_repetition_penalty(row, [0, 0], 1.3),
    "huge repetition": lambda row: infer.apply_repetition_penalty(row, [0], 1e300),
    "tiny repetition": lambda row: infer.apply_repetition_penalty(row, [0], 1e-300),
    "frequency": lambda row: infer.apply_frequency_penalty(row, [0, 0], 1.5),
    "presence": lambda row: infer.apply_presence_penalty(row, [0, 0], -1.5),
    "bias": lambda row: infer.apply_logit_bias(row, {0: 5.0}),
    "huge bias": lambda row: infer.apply_logit_bias(row, {0: 1e300}),
    "forcing bias": lambda row: infer.apply_logit_bias(row, dict.fromkeys(range(len(row)), INF)),
    "allowed": lambda row: keep_allowed(row, range(len(row))),
}

OFF: dict[str, Callable[[Tensor], Tensor]] = {
    "temperature": lambda row: infer.apply_temperature(row, 1.0),
    "top_k None": lambda row: infer.apply_top_k(row, None),
    "every knob": lambda row: process_logits(row, [0, 0], SamplingParams()),
    "top_k of the vocabulary": lambda row: infer.apply_top_k(row, len(row)),
    "top_k of more": lambda row: infer.apply_top_k(row, 10**12),
    "top_p": lambda row: infer.apply_top_p(row, 1.0),
    "min_p": lambda row: infer.apply_min_p(row, 0.0),
    "repetition": lambda row: infer.apply_repetition_penalty(row, [0], 1.0),
    "repetition without context": lambda row: infer.apply_repetition_penalty(row, [], 2.0),
    "frequency": lambda row: infer.apply_frequency_penalty(row, [0], 0.0),
    "presence": lambda row: infer.apply_presence_penalty(row, [0], 0.0),
    "bias": lambda row: infer.apply_logit_bias(row, None),
    "no bias": lambda row: infer.apply_logit_bias(row, {}),
    "zero bias": lambda row: infer.apply_logit_bias(row, {0: 0.0}),
    "allowed": lambda row: keep_allowed(row, None),
}


def ranked_ids(row: Tensor) -> list[int]:
    return sorted(range(len(row)), key=lambda i: (-float(row[i]), i))


# Stages in general


@pytest.mark.parametrize("stage", STAGES)
@few
@given(row=live_rows, dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16, torch.float64]))
def test_a_stage_keeps_shape_dtype_its_input_and_a_token(stage: str, row: Tensor, dtype: torch.dtype) -> None:
    row = row.where(row == -INF, row.clamp(-6e4, 6e4)).to(dtype)
    before = row.clone()
    after = STAGES[stage](row)
    assert (after.shape, after.dtype) == (row.shape, row.dtype)
    assert same_bits(row, before)
    assert (after < INF).all()
    assert set() < set(kept_ids(after)) <= set(kept_ids(row))
    assert STAGES[stage](torch.full_like(row, -INF)).tolist() == [-INF] * len(row)


@pytest.mark.parametrize("stage", OFF)
@few
@given(row=live_rows)
def test_a_disabled_stage_is_the_identity_bit_for_bit(stage: str, row: Tensor) -> None:
    assert same_bits(OFF[stage](row), row) or stage == "zero bias"
    assert torch.equal(OFF[stage](row), row)


# The rules of the documentation: parameters, the logits' probabilities, and the ids that are kept

KEPT: list[tuple[dict[str, Any], list[float], Sequence[int]]] = [
    ({"top_k": 3}, [0.1, 0.5, 0.02, 0.3, 0.1, 0.4, 0.11, 0.07, 0.2, 0.05], [1, 3, 5]),
    ({"top_k": 7}, [1] * 1000, range(7)),
    *(
        ({"top_p": p}, [0.5, 0.3, 0.15, 0.05], range(count))
        for p, count in ((0.01, 1), (0.5, 1), (0.51, 2), (0.8, 2), (0.81, 3), (0.95, 3), (0.96, 4))
    ),
    *(({"top_p": count / 10}, [1] * 10, range(count)) for count in range(1, 10)),
    ({"top_p": 0.55}, [0.4, 0.3, 0.2, 0.1], [0, 1]),
    ({"top_p": 0.55, "top_k": 2}, [0.4, 0.3, 0.2, 0.1], [0]),  # renormalised
    ({"top_p": 0.6}, [0, 1, 0, 1], [1, 3]),  # filtered logits count for nothing
    ({"top_p": 1e-9}, [0.1, 0.4, 0.4, 0.1], [1]),
    ({"min_p": 0.1}, [0.5, 0.2, 0.2, 0.04, 0.06], [0, 1, 2, 4]),
    ({"min_p": 0.999}, [0.5, 0.2, 0.2, 0.04, 0.06], [0]),
    ({"min_p": 0.25, "top_p": 0.8}, [0.5, 0.2, 0.15, 0.1, 0.05], [0, 1, 2]),  # top-p first
    ({"temperature": 2.0, "top_p": 0.6}, [0.6, 0.25, 0.15], [0, 1]),  # the temperature first
    ({"temperature": 2.0, "top_p": 0.6, "temperature_last": True}, [0.6, 0.25, 0.15], [0]),
    ({"allowed_token_ids": [1, 2]}, [0.25] * 4, [1, 2]),
]


@pytest.mark.parametrize(("values", "probabilities", "kept"), KEPT, ids=str)
def test_filters_keep_the_documented_tokens(
    values: dict[str, Any], probabilities: list[float], kept: Sequence[int]
) -> None:
    row = torch.tensor(probabilities).log()
    found = process_logits(row, [], SamplingParams(**values))
    assert kept_ids(found) == list(kept)
    assert torch.equal(found[list(kept)], row[list(kept)] / values.get("temperature", 1.0))


# Parameters, logits, the context, the number of its tokens that are the prompt's, and the logits after the stages
EDITED: list[tuple[dict[str, Any], list[float], list[int], int, list[float]]] = [
    ({"temperature": 0.5}, [1.0, -2.0, 3.5], [], 0, [2.0, -4.0, 7.0]),
    ({"temperature": 2.0}, [1.0, -2.0, 3.5], [], 0, [0.5, -1.0, 1.75]),
    ({"repetition_penalty": 2.0}, [3.0, -3.0, 0.0, 3.0, -INF], [0, 0, 0, 1, 1, 2, 4], 0, [1.5, -6.0, 0.0, 3.0, -INF]),
    *(
        ({"repetition_penalty": 2.0, "repetition_window": window}, [1.0] * 4, [0, 1, 2], 2, [*halved, 1.0])
        for window, halved in ((None, [0.5] * 3), (99, [0.5] * 3), (2, [1, 0.5, 0.5]), (1, [1, 1, 0.5]), (0, [1, 1, 1]))
    ),
    ({"frequency_penalty": 0.5}, [1.0] * 3, [0, 0, 1], 0, [0.0, 0.5, 1.0]),
    ({"presence_penalty": 0.5}, [1.0] * 3, [0, 0, 1], 0, [0.5, 0.5, 1.0]),
    ({"frequency_penalty": -2.0}, [1.0] * 3, [0, 0], 0, [5.0, 1.0, 1.0]),
    *(
        ({name: 1.0}, [0.0] * 3, [0, 1], num_prompt_tokens, [0.0, num_prompt_tokens - 2.0, 0.0])
        for name in ("frequency_penalty", "presence_penalty")
        for num_prompt_tokens in (1, 2)  # the prompt does not count
    ),
    ({"logit_bias": {0: 3.0}, "repetition_penalty": 2.0, "temperature": 0.5}, [-1.0, 0.0], [0], 0, [2.0, 0.0]),
    ({"repetition_penalty": 4.0, "top_k": 1}, [3.0, 2.0], [0], 0, [-INF, 2.0]),  # penalties come before the filters
    ({"logit_bias": {0: -INF}}, [5.0, 1.0, 2.0], [], 0, [-INF, 1.0, 2.0]),
    ({"logit_bias": {1: INF, 2: INF, 0: 9.0}}, [5.0, 1.0, 2.0], [], 0, [-INF, 1.0, 2.0]),
    ({"logit_bias": {1: INF, 0: 9.0, 2: -INF}}, [5.0, 1.0, 2.0], [], 0, [-INF, 1.0, -INF]),
]


@pytest.mark.parametrize(("values", "row", "context", "num_prompt_tokens", "expected"), EDITED)
def test_penalties_biases_and_the_temperature_give_the_documented_logits(
    values: dict[str, Any], row: list[float], context: list[int], num_prompt_tokens: int, expected: list[float]
) -> None:
    params = SamplingParams(**values)
    found = process_logits(torch.tensor(row), context, params, num_prompt_tokens=num_prompt_tokens)
    assert found.tolist() == expected


@few
@given(row=live_rows, temperature=st.floats(5e-324, 1e-30))
def test_a_vanishing_temperature_is_greedy(row: Tensor, temperature: float) -> None:
    gap = row.max() - row[row < row.max()].max() if (row < row.max()).any() else torch.tensor(INF)
    token = sample_token(row, [], SamplingParams(temperature=temperature, seed=1))
    assert row[token] == row.max() or float(gap) < 1e-5


@few
@given(row=rows, k=st.integers(1, 45))
def test_top_k_keeps_exactly_k_in_the_total_order(row: Tensor, k: int) -> None:
    expected = [i for i in ranked_ids(row)[:k] if row[i] > -INF]
    assert kept_ids(infer.apply_top_k(row, k)) == sorted(expected)


@few
@given(row=live_rows, p=st.floats(0.001, 0.999))
def test_top_p_keeps_the_smallest_sufficient_set(row: Tensor, p: float) -> None:
    kept = kept_ids(infer.apply_top_p(row, p))
    probabilities = row.double().softmax(0)
    ranked = [i for i in ranked_ids(row) if row[i] > -INF]
    assert kept == sorted(ranked[: len(kept)])
    assert float(probabilities[kept].sum()) >= p - 2e-7
    assert len(kept) == 1 or float(probabilities[ranked[: len(kept) - 1]].sum()) < p


# The functions that `infer` exports

WRONG: dict[str, Callable[[Tensor], Tensor]] = {
    "top_k must be at least 1": lambda row: infer.apply_top_k(row, 0),
    **{rf"top_p must .* got {p}": lambda row, p=p: infer.apply_top_p(row, p) for p in (-1.0, 0.0, 1.5, INF, math.nan)},
    "min_p must be": lambda row: infer.apply_min_p(row, 1.0),
    "repetition_penalty must be above 0": lambda row: infer.apply_repetition_penalty(row, [0], 0.0),
    "penalty .* must be a number": lambda row: infer.apply_frequency_penalty(row, [0], math.nan),
    "a penalty .* must be a number": lambda row: infer.apply_presence_penalty(row, [0], math.nan),
    "logit_bias": lambda row: infer.apply_logit_bias(row, {0: math.nan}),
    "temperature must be above 0 .* got nan": lambda row: infer.apply_temperature(row, math.nan),
    "temperature must be above 0 .* got 0.0": lambda row: infer.apply_temperature(row, 0.0),
    "the context: token id must be in": lambda row: infer.apply_repetition_penalty(row, [3], 2.0),
    "one row of floats": lambda row: torch.tensor(sample_token(row[:0], [], SamplingParams())),
    "num_prompt_tokens must .* got -1": lambda row: process_logits(row, [0], SamplingParams(), num_prompt_tokens=-1),
    "num_prompt_tokens must .* got 2": lambda row: process_logits(row, [0], SamplingParams(), num_prompt_tokens=2),
}


@pytest.mark.parametrize("message", WRONG)
def test_a_stage_refuses_a_value_that_breaks_its_rule(message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message) as caught:
        WRONG[message](torch.zeros(3))
    assert "\n" not in str(caught.value)


IN_USE: dict[str, Any] = {"temperature": 0.5, "top_k": 2, "top_p": 0.5, "min_p": 0.1, "logit_bias": {0: 1.0}}
IN_USE |= {"repetition_penalty": 2.0, "frequency_penalty": 1.0, "presence_penalty": 1.0}


@pytest.mark.parametrize("name", [name for name in infer.__all__ if name.startswith("apply_")])
def test_the_sampler_computes_with_the_exported_stages(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert getattr(infer, name) is getattr(row_stages, name)
    called, parameter = list[str](), name.removeprefix("apply_")

    def spy(row: Tensor, *_: Any) -> Tensor:
        called.append(name)
        return row

    if parameter in FILTERS:
        monkeypatch.setitem(FILTERS, parameter, FILTERS[parameter]._replace(apply=spy))
    else:
        monkeypatch.setattr(definition, name, spy)
    sample_token(torch.zeros(3), [0], SamplingParams(seed=1, **IN_USE))
    assert called == [name]


def test_a_token_that_is_forced_and_impossible_leaves_nothing() -> None:
    row = torch.tensor([5.0, 1.0, 2.0, -INF])
    assert kept_ids(infer.apply_logit_bias(row, {3: INF})) == []
    with pytest.raises(LogitsError, match="no token of this row is allowed"):
        sample_token(row, [], SamplingParams(temperature=0, logit_bias={3: INF}))
    assert sample_token(row, [], SamplingParams(temperature=0, logit_bias={1: INF})) == 1


@pytest.mark.parametrize("token_id", [-1, 5, 10**18])
@cases(
    "call",
    lambda row, i: infer.apply_logit_bias(row, {i: 1.0}),
    lambda row, i: keep_allowed(row, [i]),
    lambda row, i: infer.apply_repetition_penalty(row, [i], 1.1),
    lambda row, i: infer.apply_frequency_penalty(row, [i], 1.1),
    lambda row, i: infer.apply_presence_penalty(row, [i], 1.1),
    lambda row, i: sample_token(row, [], SamplingParams(min_new_tokens=1), eos_token_ids={i}),
    lambda row, i: log_probabilities(row, 1, i),
)
def test_an_id_outside_the_vocabulary_is_an_error_naming_it(call: Callable[[Tensor, int], Any], token_id: int) -> None:
    with pytest.raises(InvalidRequestError, match=rf"must be in \[0, 5\), the vocabulary, got {token_id}"):
        call(torch.zeros(5), token_id)


# Masks and the minimum length


def test_allowed_ids_and_mask_intersect() -> None:
    mask = torch.tensor([True, True, False, False])
    params = SamplingParams(allowed_token_ids=[1, 2])
    assert kept_ids(process_logits(torch.zeros(4), [], params, allowed=mask)) == [1]
    assert kept_ids(process_logits(torch.zeros(4), [], params, allowed=[1, 3])) == [1]
    with pytest.raises(LogitsError, match="allowed"):
        process_logits(torch.zeros(4), [], params, allowed=[0])


def test_a_mask_of_the_wrong_shape_is_an_error() -> None:
    with pytest.raises((InvalidRequestError, TypeCheckError), match=r"bool \[4\]|\[True, True, True\]"):
        keep_allowed(torch.zeros(4), torch.ones(3, dtype=torch.bool))


def test_the_end_is_banned_until_the_minimum_length() -> None:
    params = SamplingParams(temperature=0, min_new_tokens=2, stop_token_ids=[1])
    row = torch.tensor([9.0, 8.0, 1.0])
    tokens = [sample_token(row, [2] * n, params, num_prompt_tokens=1, eos_token_ids={0}) for n in range(1, 5)]
    assert tokens == [2, 2, 0, 0]


def test_a_finished_grammar_ends_below_the_minimum_length() -> None:
    params = SamplingParams(temperature=0, min_new_tokens=2)
    assert sample_token(torch.zeros(3), [], params, eos_token_ids={1}, allowed=[1]) == 1


def test_a_bias_does_not_allow_banned_tokens() -> None:
    params = SamplingParams(temperature=0, min_new_tokens=1, logit_bias={0: 50.0, 2: 50.0}, allowed_token_ids=[0, 1])
    assert sample_token(torch.zeros(3), [], params, eos_token_ids={0}) == 1


@few
@given(row=live_rows, context=st.lists(st.integers(0, 0), max_size=5))
def test_greedy_ignores_the_filters_and_takes_the_smallest_id_of_the_largest(row: Tensor, context: list[int]) -> None:
    plain = sample_token(row, context, SamplingParams(temperature=0, repetition_penalty=1.3))
    filtered = SamplingParams(temperature=0, repetition_penalty=1.3, top_k=1, top_p=0.01, min_p=0.9)
    assert sample_token(row, context, filtered) == plain
    assert ranked_ids(infer.apply_repetition_penalty(row, context, 1.3))[0] == plain


# Sampling


FULL = {"temperature": 0.8, "top_k": 50, "top_p": 0.9, "repetition_penalty": 1.1}


@few
@given(row=live_rows, seed=st.integers(0, 2**64 - 1), context=st.lists(st.just(0), max_size=9))
def test_the_full_pipeline_samples_a_token_that_every_filter_kept(row: Tensor, seed: int, context: list[int]) -> None:
    params = SamplingParams(seed=seed, **FULL)  # type: ignore[arg-type]
    token = sample_token(row, context, params)
    assert token in kept_ids(process_logits(row, context, params))
    assert sample_token(row.clone(), context, params) == token


def draws(row: Tensor, params: SamplingParams, count: int) -> list[int]:
    return [sample_token(row, [0] * position, params) for position in range(count)]


def test_a_seed_repeats_itself_and_another_differs() -> None:
    row = torch.linspace(0, 2, 100)
    streams = [draws(row, SamplingParams(seed=seed), 20) for seed in (1, 1, 2, 2**64 - 1)]
    for seed in (1, 1, 2):
        generator = torch.Generator().manual_seed(seed)
        streams.append([sample_token(row, [], SamplingParams(seed=5), generator) for _ in range(20)])
    assert (streams[0], streams[4]) == (streams[1], streams[5])
    assert len(set(map(tuple, streams))) == 5
    assert min(len(set(stream)) for stream in streams) > 5
    assert len({sample_token(torch.zeros(10_000), [], SamplingParams()) for _ in range(10)}) > 1  # without a seed


@pytest.mark.slow(cases=2)
@pytest.mark.parametrize("source", ["seed", "generator"])
@pytest.mark.parametrize("logits", [torch.zeros(20), torch.linspace(-2, 2, 20)], ids=["uniform", "sloped"])
def test_draws_follow_the_softmax(source: str, logits: Tensor) -> None:
    """Chi-square on 1,000 draws over 20 tokens exceeds the bound (69.5 at 19 degrees of freedom) once in 10⁷."""
    generator = torch.Generator().manual_seed(3) if source == "generator" else None
    params = SamplingParams(seed=3)
    drawn = [sample_token(logits, [0] * position, params, generator) for position in range(1000)]
    counts = torch.bincount(torch.tensor(drawn), minlength=20).double()
    expected = logits.double().softmax(0) * 1000
    assert float(((counts - expected) ** 2 / expected).sum()) < 69.5


def test_half_precision_is_sampled_as_its_float32() -> None:
    row = torch.randn(500, generator=torch.Generator().manual_seed(1)).bfloat16()
    params = SamplingParams(seed=9, **FULL)  # type: ignore[arg-type]
    assert draws(row, params, 20) == draws(row.float(), params, 20)


# Rows that cannot be sampled


@pytest.mark.parametrize("values", [[-INF, -INF], [0.0, math.nan], [-INF, math.nan], [INF, math.nan], [INF, 0.0]])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_that_cannot_be_sampled_is_a_named_error(values: list[float], temperature: float) -> None:
    with pytest.raises(LogitsError):
        sample_token(torch.tensor(values), [], SamplingParams(temperature=temperature))
    assert issubclass(LogitsError, InferError)


# Log-probabilities


def test_log_probabilities_give_the_chosen_token_its_rank_and_the_likeliest() -> None:
    row = torch.tensor([0.1, 0.4, 0.1, 0.4]).log()
    entry = log_probabilities(row, 3, 2)
    assert (entry.token_id, entry.rank, entry.logprob) == (2, 4, pytest.approx(math.log(0.1), abs=1e-6))
    assert [token_id for token_id, _ in entry.top] == [1, 3, 0]
    none = log_probabilities(row, 0)
    assert (none.token_id, none.rank, none.top) == (1, 1, ())


@few
@given(row=live_rows, k=st.integers(0, 20))
def test_log_probabilities_are_those_of_the_softmax(row: Tensor, k: int) -> None:
    entry = log_probabilities(row, k)
    expected = row.double().log_softmax(0).float()  # values below float32's range are −inf
    assert [token_id for token_id, _ in entry.top] == ranked_ids(row)[:k]
    for token_id, logprob in entry.top:
        assert logprob == pytest.approx(float(expected[token_id]), rel=1e-5, abs=1e-5)
