"""The batched sampler compared with Hugging Face's processors and warpers, and with figures of llama.cpp's own test.

By design we differ from Hugging Face in four places, each with a test that says so:

* top-k: Hugging Face keeps everything equal to the k-th logit, we keep exactly k, the smallest ids among equals.
* top-p: Hugging Face sums float32 probabilities from the smallest up and drops what stays within 1 − p; we sum integers
  from the largest down. A set whose sum is within rounding of p can differ by one token; equal logits at the border
  stay by id here and by the sort's whim there.
* min-p: Hugging Face compares probabilities in float32, we compare logits: a token at the very threshold may differ.
* repetition penalty: a logit of 0 is multiplied here and divided there, which is the same.
"""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from infer.compute.sampling import sampler
from infer.serving.protocols.params import make_params
from sampling_cases import INF, Row, make_batch, make_logits

VOCAB = 300
few = settings(max_examples=25, deadline=None)
seeds = st.integers(0, 2**32 - 1)
context_lists = st.lists(st.integers(0, 40), min_size=1, max_size=30)


def ours(logits: Tensor, context: list[int], num_prompt_tokens: int = 0, **values: Any) -> Tensor:
    batch = make_batch([Row(logits, {"seed": 0} | values, tuple(context), num_prompt_tokens)], frozenset([7]))
    return sampler.process(*batch.arguments())[0]


def theirs(logits: Tensor, context: list[int], *processors: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    found: Tensor = LogitsProcessorList(processors)(torch.tensor([context]), logits[None].clone())[0]
    return found


def kept(logits: Tensor) -> list[int]:
    return (logits > -INF).nonzero()[:, 0].tolist()


def assert_same_distribution(found: Tensor, expected: Tensor) -> None:
    assert kept(found) == kept(expected)
    assert float((found.double().softmax(0) - expected.double().softmax(0)).abs().max()) < 1e-6


# Hugging Face


@few
@given(seeds, context_lists, st.sampled_from([0.5, 1.0, 1.1, 2.0, 10.0]))
def test_the_repetition_penalty_is_hugging_faces_bit_for_bit(seed: int, context: list[int], penalty: float) -> None:
    logits = make_logits("normal", VOCAB, seed)
    found = ours(logits, context, len(context) // 2, repetition_penalty=penalty)
    assert torch.equal(found, theirs(logits, context, RepetitionPenaltyLogitsProcessor(penalty)))


@few
@given(seeds, context_lists, st.data())
def test_a_repetition_window_is_the_penalty_on_the_last_ids(seed: int, context: list[int], data: st.DataObject) -> None:
    logits = make_logits("normal", VOCAB, seed)
    window = data.draw(st.integers(1, len(context)))
    found = ours(logits, context, repetition_penalty=1.3, repetition_window=window)
    assert torch.equal(found, theirs(logits, context[-window:], RepetitionPenaltyLogitsProcessor(1.3)))


@few
@given(seeds, st.sampled_from([0.1, 0.7, 1.0, 1.9]))
def test_temperature_is_hugging_faces_bit_for_bit(seed: int, temperature: float) -> None:
    logits = make_logits("wide", VOCAB, seed)
    assert torch.equal(
        ours(logits, [0], temperature=temperature), theirs(logits, [0], TemperatureLogitsWarper(temperature))
    )


@few
@given(seeds, st.integers(1, VOCAB + 5))
def test_top_k_is_hugging_faces_where_no_logits_are_equal(seed: int, k: int) -> None:
    logits = make_logits("normal", VOCAB, seed)
    assert len(logits.unique()) == VOCAB
    assert torch.equal(ours(logits, [0], top_k=k), theirs(logits, [0], TopKLogitsWarper(k)))


def test_top_k_keeps_exactly_k_of_equal_logits_where_hugging_face_keeps_all() -> None:
    logits = torch.tensor([1.0, 2.0, 2.0, 2.0, 0.0])
    assert kept(ours(logits, [0], top_k=2)) == [1, 2]
    assert kept(theirs(logits, [0], TopKLogitsWarper(2))) == [1, 2, 3]


@few
@given(seeds, st.sampled_from([0.01, 0.3, 0.5, 0.9, 0.95, 0.99]))
def test_top_p_is_hugging_faces_but_for_a_token_at_the_border(seed: int, p: float) -> None:
    logits = make_logits("normal", VOCAB, seed)
    found, expected = kept(ours(logits, [0], top_p=p)), kept(theirs(logits, [0], TopPLogitsWarper(p)))
    probabilities = logits.double().softmax(0)
    differing = set(found) ^ set(expected)
    assert len(differing) <= 1
    if differing:
        smaller = min((found, expected), key=len)
        assert float(probabilities[smaller].sum()) == pytest.approx(p, abs=1e-5)


@few
@given(seeds, st.sampled_from([0.01, 0.05, 0.1, 0.5, 0.9]))
def test_min_p_is_hugging_faces(seed: int, min_p: float) -> None:
    logits = make_logits("normal", VOCAB, seed)
    assert torch.equal(ours(logits, [0], min_p=min_p), theirs(logits, [0], MinPLogitsWarper(min_p)))


@few
@given(seeds, st.dictionaries(st.integers(0, VOCAB - 1), st.sampled_from([-4.0, 2.5, 100.0, -INF]), min_size=1))
def test_a_bias_is_hugging_faces_sequence_bias_of_one_token(seed: int, bias: dict[int, float]) -> None:
    logits = make_logits("normal", VOCAB, seed)
    sequence_bias = {(token_id,): value for token_id, value in bias.items()}
    expected = theirs(logits, [0], SequenceBiasLogitsProcessor(sequence_bias))
    assert torch.equal(ours(logits, [0], logit_bias=bias), expected)


def test_allowed_ids_are_the_rest_suppressed() -> None:
    logits = make_logits("normal", VOCAB, 1)
    allowed = [3, 5, 200]
    rest = [i for i in range(VOCAB) if i not in allowed]
    found = ours(logits, [0], allowed_token_ids=allowed)
    assert torch.equal(found, theirs(logits, [0], SuppressTokensLogitsProcessor(rest, device="cpu")))


@pytest.mark.parametrize("num_output", [0, 1, 2, 3])
def test_the_minimum_length_is_hugging_faces(num_output: int) -> None:
    logits = make_logits("normal", VOCAB, 1)
    context = [0, 1] + [2] * num_output
    expected = theirs(logits, context, MinNewTokensLengthLogitsProcessor(2, 2, [7], device="cpu"))
    assert torch.equal(ours(logits, context, 2, min_new_tokens=2), expected)


@few
@given(seeds, context_lists)
def test_the_whole_pipeline_is_hugging_faces_in_its_order(seed: int, context: list[int]) -> None:
    logits = make_logits("normal", VOCAB, seed)
    expected = theirs(
        logits,
        context,
        SequenceBiasLogitsProcessor({(5,): 3.0, (9,): -INF}),
        RepetitionPenaltyLogitsProcessor(1.2),
        TemperatureLogitsWarper(0.8),
        TopKLogitsWarper(50),
        TopPLogitsWarper(0.9),
        MinPLogitsWarper(0.03),
    )
    found = ours(
        logits,
        context,
        logit_bias={5: 3.0, 9: -INF},
        repetition_penalty=1.2,
        temperature=0.8,
        top_k=50,
        top_p=0.9,
        min_p=0.03,
    )
    differing = set(kept(found)) ^ set(kept(expected))
    assert len(differing) <= 1  # a token at the border of top-p
    if not differing:
        assert_same_distribution(found, expected)


# llama.cpp's figures: probabilities in, parameters, the probabilities that are left, largest first unless in id order

TENTHS = [0.1, 0.2, 0.3, 0.4]
FIFTHS = [0.2] * 5
FILTERS: list[tuple[str, float, list[float]]] = [
    ("top_k", 1, [1.0]),
    ("top_k", 3, [0.44444, 0.33333, 0.22222]),
    ("top_k", 4, [0.4, 0.3, 0.2, 0.1]),
    ("top_p", 0.7, [0.571429, 0.428571]),
    ("top_p", 0.8, [0.44444, 0.33333, 0.22222]),
    ("top_p", 1.0, [0.4, 0.3, 0.2, 0.1]),
    ("min_p", 0.0, [0.4, 0.3, 0.2, 0.1]),
    ("min_p", 0.24, [0.4, 0.3, 0.2, 0.1]),
    ("min_p", 0.26, [0.4 / 0.9, 0.3 / 0.9, 0.2 / 0.9]),
    ("min_p", 0.49, [0.4 / 0.9, 0.3 / 0.9, 0.2 / 0.9]),
    ("min_p", 0.51, [0.4 / 0.7, 0.3 / 0.7]),
    ("min_p", 0.74, [0.4 / 0.7, 0.3 / 0.7]),
    ("min_p", 0.76, [1.0]),
    ("temperature", 1.0, [0.4, 0.3, 0.2, 0.1]),
]


def probabilities_left(logits: Tensor) -> list[float]:
    return [x for x in logits.double().softmax(0).tolist() if x > 0]


@pytest.mark.parametrize(("name", "value", "expected"), FILTERS)
def test_filters_leave_the_tokens_of_llama_cpp(name: str, value: float, expected: list[float]) -> None:
    found = ours(torch.tensor(TENTHS).log(), [0], **{name: value})
    assert sorted(probabilities_left(found), reverse=True) == pytest.approx(expected, abs=1e-5)


def test_top_p_of_zero_keeps_the_largest_as_in_llama_cpp() -> None:
    (params,) = make_params({"top_p": 0}, {}, [0], "prompt")  # as a body gives it
    assert probabilities_left(ours(torch.tensor(TENTHS).log(), [0], top_p=params.top_p)) == pytest.approx([1.0])


def test_values_of_llama_cpp_outside_our_ranges_are_refused() -> None:
    """In llama.cpp, top_k 0 and min_p from 1 on have meanings. Here they are errors that name the rule."""
    for name, value in (("top_k", 0), ("min_p", 1.0), ("min_p", 1.05)):
        with pytest.raises(ValueError, match=f"{name} must be"):
            ours(torch.tensor(TENTHS).log(), [0], **{name: value})


@pytest.mark.parametrize(
    ("context", "expected"),
    [
        ([0], [0.0, 0.25, 0.25, 0.25, 0.25]),
        ([0, 1, 2], [0.0, 0.0, 0.0, 0.5, 0.5]),
        ([0, 1, 2, 0, 0], [0.0, 0.0, 0.0, 0.5, 0.5]),
    ],
)
def test_a_repetition_penalty_of_50_has_llama_cpp_s_result(context: list[int], expected: list[float]) -> None:
    found = ours(torch.tensor(FIFTHS).log(), context, repetition_penalty=50.0)
    assert found.softmax(0).tolist() == pytest.approx(expected, abs=1e-5)


# llama.cpp's frequency and presence penalties are 5 here. Ours are at most 2, so all values are divided by five.
@pytest.mark.parametrize("context", [[0], [0, 1, 2], [0, 1, 2, 0, 0]])
def test_frequency_and_presence_are_llama_cpps_formula(context: list[int]) -> None:
    found = ours(torch.tensor(FIFTHS).log(), context, frequency_penalty=1.0, presence_penalty=1.0)
    counts = [context.count(token_id) for token_id in range(5)]
    weights = [math.exp(-count - (count > 0)) for count in counts]
    assert found.softmax(0).tolist() == pytest.approx([weight / sum(weights) for weight in weights], abs=1e-6)


@pytest.mark.parametrize(
    ("context", "expected"),
    [
        ([0], [0.000011, 0.249997, 0.249997, 0.249997, 0.249997]),
        ([0, 1, 2], [0.000023, 0.000023, 0.000023, 0.499966, 0.499966]),
        ([0, 1, 2, 0, 0], [0.0, 0.000023, 0.000023, 0.499977, 0.499977]),
    ],
)
def test_the_penalty_functions_have_llama_cpp_s_result_at_5_and_5(context: list[int], expected: list[float]) -> None:
    """The formula has no bounds: the reference's two functions take values that `SamplingParams` refuses."""
    from infer.compute.sampling.definition import apply_frequency_penalty, apply_presence_penalty

    found = apply_presence_penalty(apply_frequency_penalty(torch.tensor(FIFTHS).log(), context, 5.0), context, 5.0)
    assert found.softmax(0).tolist() == pytest.approx(expected, abs=1e-5)


# llama.cpp's queues on 10,000 tokens with logits ln(id), those in our order: k before p before m
QUEUES: list[tuple[dict[str, float], int, int]] = [
    ({"top_k": 10_000}, 1, 9_999),
    ({"top_k": 1}, 9_999, 1),
    ({"top_k": 100}, 9_900, 100),
    ({"top_p": 0.0003}, 9_998, 2),
    ({"top_p": 0.8}, 4_472, 5_528),
    ({"min_p": 9997.9 / 9999}, 9_998, 2),
    ({"min_p": 0.1}, 1_000, 9_000),
    ({"top_k": 100, "top_p": 0.8}, 9_920, 80),
    ({"top_k": 100, "min_p": 0.1}, 9_900, 100),
    ({"top_p": 0.8, "min_p": 0.1}, 4_472, 5_528),
    ({"top_k": 100, "top_p": 0.8, "min_p": 0.1}, 9_920, 80),
]


@pytest.mark.parametrize(("values", "smallest_id", "count"), QUEUES)
def test_queues_of_filters_keep_llama_cpp_s_ids(values: dict[str, float], smallest_id: int, count: int) -> None:
    """Token 0 has probability 0 (ln 0) and is never kept here. Llama.cpp counts it if nothing is filtered."""
    found = ours(torch.arange(10_000).float().log(), [1], **values)
    assert kept(found) == list(range(smallest_id, smallest_id + count))
