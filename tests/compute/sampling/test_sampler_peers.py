"""The sampler compared with Hugging Face's processors and warpers, and with figures of llama.cpp's own test.

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
from transformers.generation import logits_process as hf

from infer.compute.sampling.definition import process_logits
from sampling_cases import INF, Row, by_reference, kept_ids, make_logits

VOCAB = 300
few = settings(max_examples=25, deadline=None)
seeds = st.integers(0, 2**32 - 1)
context_lists = st.lists(st.integers(0, 40), min_size=1, max_size=30)


def ours(logits: Tensor, context: list[int], num_prompt_tokens: int = 0, **values: Any) -> Tensor:
    row = Row(logits, {"seed": 0} | values, tuple(context), num_prompt_tokens)
    found: Tensor = by_reference(process_logits, row, frozenset([7]))
    return found


def theirs(logits: Tensor, context: list[int], *processors: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    found: Tensor = hf.LogitsProcessorList(processors)(torch.tensor([context]), logits[None].clone())[0]
    return found


# Hugging Face


PEERS: list[tuple[dict[str, Any], Callable[[Tensor, Tensor], Tensor]]] = [
    *(({"repetition_penalty": x}, hf.RepetitionPenaltyLogitsProcessor(x)) for x in (0.5, 1.0, 1.1, 2.0, 10.0)),
    *(({"temperature": x}, hf.TemperatureLogitsWarper(x)) for x in (0.1, 0.7, 1.0, 1.9)),
    *(({"top_k": k}, hf.TopKLogitsWarper(k)) for k in (1, 2, 57, VOCAB - 1, VOCAB, VOCAB + 5)),  # of different logits
    *(({"min_p": x}, hf.MinPLogitsWarper(x)) for x in (0.01, 0.05, 0.1, 0.5, 0.9)),
    (
        {"allowed_token_ids": [3, 5, 200]},
        hf.SuppressTokensLogitsProcessor([*{*range(VOCAB)} - {3, 5, 200}], device="cpu"),
    ),
    *(
        ({"logit_bias": bias}, hf.SequenceBiasLogitsProcessor({(token_id,): value for token_id, value in bias.items()}))
        for bias in ({0: -4.0, 299: 2.5}, {7: 100.0, 8: -INF}, {3: -INF})
    ),
]


@pytest.mark.parametrize(("values", "processor"), PEERS, ids=lambda value: str(value) if type(value) is dict else "")
def test_a_stage_has_hugging_faces_bits(values: dict[str, Any], processor: Callable[[Tensor, Tensor], Tensor]) -> None:
    for seed in range(8):
        logits, context = make_logits("wide" if seed % 2 else "normal", VOCAB, seed), list(range(0, 9 * seed + 1, 3))
        assert len(logits.unique()) == VOCAB
        assert torch.equal(ours(logits, context, seed // 2, **values), theirs(logits, context, processor))


@few
@given(seeds, context_lists, st.data())
def test_a_repetition_window_is_the_penalty_on_the_last_ids(seed: int, context: list[int], data: st.DataObject) -> None:
    logits = make_logits("normal", VOCAB, seed)
    window = data.draw(st.integers(1, len(context)))
    found = ours(logits, context, repetition_penalty=1.3, repetition_window=window)
    assert torch.equal(found, theirs(logits, context[-window:], hf.RepetitionPenaltyLogitsProcessor(1.3)))


def test_top_k_keeps_exactly_k_of_equal_logits_where_hugging_face_keeps_all() -> None:
    logits = torch.tensor([1.0, 2.0, 2.0, 2.0, 0.0])
    assert kept_ids(ours(logits, [0], top_k=2)) == [1, 2]
    assert kept_ids(theirs(logits, [0], hf.TopKLogitsWarper(2))) == [1, 2, 3]


@few
@given(seeds, st.sampled_from([0.01, 0.3, 0.5, 0.9, 0.95, 0.99]))
def test_top_p_is_hugging_faces_but_for_a_token_at_the_border(seed: int, p: float) -> None:
    logits = make_logits("normal", VOCAB, seed)
    found, expected = kept_ids(ours(logits, [0], top_p=p)), kept_ids(theirs(logits, [0], hf.TopPLogitsWarper(p)))
    probabilities = logits.double().softmax(0)
    differing = set(found) ^ set(expected)
    assert len(differing) <= 1
    if differing:
        smaller = min((found, expected), key=len)
        assert float(probabilities[smaller].sum()) == pytest.approx(p, abs=1e-5)


@pytest.mark.parametrize("num_output", [0, 1, 2, 3])
def test_the_minimum_length_is_hugging_faces(num_output: int) -> None:
    logits = make_logits("normal", VOCAB, 1)
    context = [0, 1] + [2] * num_output
    expected = theirs(logits, context, hf.MinNewTokensLengthLogitsProcessor(2, 2, [7], device="cpu"))
    assert torch.equal(ours(logits, context, 2, min_new_tokens=2), expected)


@few
@given(seeds, context_lists)
def test_the_whole_pipeline_is_hugging_faces_in_its_order(seed: int, context: list[int]) -> None:
    logits = make_logits("normal", VOCAB, seed)
    edits = [hf.SequenceBiasLogitsProcessor({(5,): 3.0, (9,): -INF}), hf.RepetitionPenaltyLogitsProcessor(1.2)]
    filters = [hf.TopKLogitsWarper(50), hf.TopPLogitsWarper(0.9), hf.MinPLogitsWarper(0.03)]
    expected = theirs(logits, context, *edits, hf.TemperatureLogitsWarper(0.8), *filters)
    values = {"logit_bias": {5: 3.0, 9: -INF}, "repetition_penalty": 1.2, "temperature": 0.8}
    found = ours(logits, context, **values, top_k=50, top_p=0.9, min_p=0.03)
    differing = set(kept_ids(found)) ^ set(kept_ids(expected))
    assert len(differing) <= 1  # a token at the border of top-p
    if not differing:
        assert float((found.double().softmax(0) - expected.double().softmax(0)).abs().max()) < 1e-6


# llama.cpp's frequency and presence penalties are 5 here. Ours are at most 2, so all values are divided by five.
@pytest.mark.parametrize("context", [[0], [0, 1, 2], [0, 1, 2, 0, 0]])
def test_frequency_and_presence_are_llama_cpps_formula(context: list[int]) -> None:
    found = ours(torch.full((5,), 0.2).log(), context, frequency_penalty=1.0, presence_penalty=1.0)
    counts = [context.count(token_id) for token_id in range(5)]
    weights = [math.exp(-count - (count > 0)) for count in counts]
    assert found.softmax(0).tolist() == pytest.approx([weight / sum(weights) for weight in weights], abs=1e-6)


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
    assert kept_ids(found) == list(range(smallest_id, smallest_id + count))
