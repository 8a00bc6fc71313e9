"""Claims about the columns of a batch: their values, parameters that are off, refusals, and the layout of masks."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cases import cases
from infer import InvalidRequestError, SamplingParams
from infer.compute.operands.step import Chunk, Masks
from infer.compute.ops import SampledStep, device
from infer.compute.sampling.columns import WHOLE_HISTORY, SamplingColumns, uses_history
from infer.compute.sampling.definition import process_logits
from infer.compute.sampling.masks import num_mask_words, pack_masks, unpack_bits
from infer.compute.sampling.noise import target
from infer.compute.sampling.sampler import Sampled
from infer.engine.runner import runner
from refusals import check_refused
from sampling_cases import kept_ids

INF = math.inf
few = settings(max_examples=25, deadline=None)


def pack(*values: dict[str, Any], vocab_size: int = 10, **options: Any) -> SamplingColumns:
    return SamplingColumns.of([SamplingParams(**{"seed": 1} | each) for each in values], vocab_size, **options)


# Columns


PASSES = ["has_penalty", "has_edits", "has_filters", "has_logprobs"]


@cases(
    "values expected",
    ({}, set()),
    ({"temperature": 0.0, "top_k": 3, "min_p": 0.1, "top_p": 0.5}, set()),
    ({"temperature": 0.5, "temperature_last": True}, set()),
    ({"top_k": 3}, {"has_filters"}),
    ({"top_k": 10}, set()),
    ({"presence_penalty": 0.1, "logprobs": 0}, {"has_penalty", "has_edits", "has_logprobs"}),
    ({"repetition_penalty": 1.1}, {"has_penalty", "has_edits"}),
    ({"repetition_penalty": 1.1, "repetition_window": 0}, set()),
    *(({"logit_bias": {1: bias}}, {"has_edits"}) for bias in (1.0, INF)),
    ({"allowed_token_ids": [1]}, {"has_edits"}),
    ({"min_new_tokens": 1, "stop_token_ids": [1]}, {"has_edits"}),
    ({"min_new_tokens": 1}, set()),
)
def test_the_host_knows_which_passes_a_batch_needs(values: dict[str, Any], expected: set[str]) -> None:
    columns = pack({}, values)
    assert {name for name in PASSES if getattr(columns, name)} == expected
    assert columns.is_filtered.tolist() == [False, "has_filters" in expected]


def test_only_rows_with_a_penalty_have_a_history_slot() -> None:
    columns = pack({}, {"presence_penalty": 1.0}, {"repetition_window": 3}, {"repetition_penalty": 2.0})
    assert columns.history_slot.tolist() == [-1, 1, -1, 3]
    assert not uses_history(SamplingParams(repetition_penalty=2.0, repetition_window=0))


def test_ragged_lists_belong_to_their_rows() -> None:
    last = {"logit_bias": {1: 3.0, 5: INF}, "min_new_tokens": 4, "stop_token_ids": [9]}
    columns = pack({"logit_bias": {7: 1.0, 2: -INF}}, {}, last, end_ids=[3])
    assert [starts.tolist() for starts in columns.starts_on_host] == [[0, 2, 2, 3], [0, 0, 0, 2]]
    expected = {"bias_ids": [2, 7, 1], "biases": [-INF, 1.0, 3.0], "end_ids": [3, 9], "mask_index": [-1, -1, 0]}
    assert {name: getattr(columns, name).tolist() for name in expected} == expected
    assert torch.equal(columns.masks, pack_masks([[5]], 10))


@pytest.mark.parametrize("seed", [0, 2**63 - 1, 2**63, 2**64 - 1])
def test_a_seed_keeps_its_64_bits(seed: int) -> None:
    assert int(pack({"seed": seed}).seed[0]) & 2**64 - 1 == seed


@pytest.mark.parametrize("number", [2**62, 2**63, 2**64, 10**30])
def test_a_number_that_no_column_holds_means_as_far_as_any_context_goes(number: int) -> None:
    columns = pack({"repetition_window": number, "min_new_tokens": number, "max_new_tokens": None, "top_k": number})
    found = [columns.on_host(name).tolist() for name in ("repetition_window", "min_new_tokens", "top_k")]
    assert found == [[WHOLE_HISTORY], [WHOLE_HISTORY], [0]]


@pytest.mark.parametrize("value", [5e-324, 1e-45, 1e-39])
def test_a_divisor_is_never_a_denormal_or_zero(value: float) -> None:
    columns = pack({"temperature": value, "repetition_penalty": value})
    tiny = torch.finfo(torch.float32).tiny
    assert (float(columns.temperature[0]), float(columns.repetition_penalty[0])) == (tiny, tiny)


@pytest.mark.parametrize("top_p", [1e-300, 1e-9, 1e-7, 1.5e-7])
def test_a_vanishing_top_p_keeps_the_likeliest_token_and_a_goal_above_nothing(top_p: float) -> None:
    columns = pack({"top_p": top_p}, vocab_size=1000)
    goal = target(torch.tensor([1 << 42]), torch.tensor(columns.on_host("top_p")))
    assert 0 < float(goal[0]) < 1 << 42
    assert kept_ids(process_logits(torch.zeros(1000), [], columns.params[0])) == [0]


# Refusals


@pytest.mark.parametrize("token_id", [10, 10**18, 10**30])
@cases(
    "name make",
    ("logit_bias", lambda i: {i: 1.0}),
    ("logit_bias", lambda i: {i: INF}),
    ("allowed_token_ids", lambda i: [1, i]),
    ("stop_token_ids", lambda i: [i]),
)
def test_an_id_outside_the_vocabulary_is_an_error_with_name_rule_and_value(name: str, make: Any, token_id: int) -> None:
    said = rf"^{name}: token id must be in \[0, 10\), the vocabulary, got {token_id}$"
    check_refused(lambda: pack({}, {name: make(token_id)}), said)


def test_ends_of_a_model_outside_the_vocabulary_are_ignored() -> None:
    assert pack({"min_new_tokens": 1}, end_ids=[-1, 10, 4]).end_ids.tolist() == [4]


def test_a_sampled_row_without_a_seed_is_an_error() -> None:
    check_refused(lambda: SamplingColumns.of([SamplingParams()], 10), "needs a seed")
    assert len(SamplingColumns.of([SamplingParams(temperature=0)], 10)) == 1


WRONG_COUNTS = [(counts, "must be 2 counts, one a row, got") for counts in ([], [1], [1, 2, 3])]


@pytest.mark.parametrize(("counts", "said"), [*WRONG_COUNTS, ([1, -1], "must be at least 0, got -1")])
def test_a_wrong_number_of_prompt_tokens_is_an_error(counts: list[int], said: str) -> None:
    check_refused(lambda: pack({}, {}, num_prompt_tokens=counts), f"num_prompt_tokens {said}")


# Slots

LISTS = {"bias_ids", "biases", "end_ids", "masks", "params"}
VARIED: list[dict[str, Any]] = [
    {},
    {"temperature": 0.0, "top_p": 0.5},
    {"top_k": 3, "top_p": 0.9, "min_p": 0.1, "temperature": 0.7, "temperature_last": True, "logprobs": 2},
    {"repetition_penalty": 1.5, "repetition_window": 7, "frequency_penalty": 0.5, "presence_penalty": 1.0},
    {"logit_bias": {1: 1.0, 4: -INF, 6: INF}, "logprobs": 0, "logprobs_mode": "processed"},
    {"allowed_token_ids": [1, 2, 3], "min_new_tokens": 3, "stop_token_ids": [9]},
    {"logit_bias": {2: -1.0}, "allowed_token_ids": [5, 2], "min_new_tokens": 2},
]


def values_of(columns: SamplingColumns, name: str) -> Any:
    return columns.whole[name][: len(columns)] if name in columns.whole else getattr(columns, name)


def assert_same(found: SamplingColumns, expected: SamplingColumns) -> None:
    for name in (found.whole.keys() | LISTS) - {"history_slot"}:
        value, wanted = (values_of(columns, name) for columns in (found, expected))
        assert torch.equal(value, wanted) if isinstance(value, torch.Tensor) else value == wanted, name
    assert (found.history_slot < 0).tolist() == (expected.history_slot < 0).tolist()
    for name in PASSES:
        assert getattr(found, name) == getattr(expected, name), name


@few
@given(st.data())
def test_selected_slots_do_not_depend_on_other_slots(data: st.DataObject) -> None:
    """Earlier writes and selections have no effect, and the columns keep their addresses."""
    columns = SamplingColumns(5, 10, end_ids=[3, 6])
    held: dict[int, tuple[SamplingParams, int]] = {}
    columns.select(range(5))
    places = {name: columns.whole[name].data_ptr() for name in columns.whole}
    for step in range(data.draw(st.integers(1, 8))):
        slot, values = data.draw(st.integers(0, 4)), data.draw(st.sampled_from(VARIED))
        held[slot] = SamplingParams(**{"seed": 100 + step} | values), step
        columns.write(slot, *held[slot])
        slots = data.draw(st.lists(st.sampled_from(sorted(held)), min_size=1, unique=True))
        columns.select(slots)
        params, prompts = [held[slot][0] for slot in slots], [held[slot][1] for slot in slots]
        assert_same(columns, SamplingColumns.of(params, 10, num_prompt_tokens=prompts, end_ids=[3, 6]))
        assert {name: columns.whole[name].data_ptr() for name in columns.whole} == places
        penalised = [uses_history(each) for each in params]
        expected = [slot if has_penalty else -1 for slot, has_penalty in zip(slots, penalised, strict=True)]
        assert columns.history_slot.tolist() == expected


def test_a_selection_is_another_one_only_if_its_slots_are_or_one_was_written() -> None:
    columns = SamplingColumns(3, 10)
    columns.select([2, 0])
    first = columns.selection
    columns.select((2, 0))
    assert columns.selection is first
    columns.write(0, SamplingParams(temperature=0.5, seed=1))
    columns.select([2, 0])
    assert columns.selection is not first
    assert columns.temperature.tolist() == [0.0, 0.5]


def test_a_slot_that_nothing_was_written_for_is_greedy() -> None:
    columns = SamplingColumns(3, 10, end_ids=[1])
    columns.select([1])
    assert_same(columns, SamplingColumns.of([SamplingParams(temperature=0)], 10))


def test_a_refusal_leaves_the_slot_unchanged() -> None:
    columns = pack({"temperature": 0.5})
    with pytest.raises(InvalidRequestError):
        columns.write(0, SamplingParams(seed=1, temperature=0.7, stop_token_ids=[10]))
    columns.select([])
    columns.select([0])
    assert_same(columns, pack({"temperature": 0.5}))


# Masks


def test_bit_j_of_word_i_is_token_32_i_plus_j() -> None:
    """This is the layout that grammar libraries fill."""
    for token_id in (0, 1, 30, 31, 32, 33, 63, 64, 99):
        words = pack_masks([[token_id]], 100)
        assert words.dtype == torch.int32
        assert words.shape == (1, 4)
        unsigned = [int(word) & 0xFFFFFFFF for word in words[0]]
        assert unsigned == [1 << token_id % 32 if i == token_id // 32 else 0 for i in range(4)]


@few
@given(st.integers(1, 200), st.data())
def test_masks_come_back_as_they_were_packed(vocab_size: int, data: st.DataObject) -> None:
    sets = data.draw(st.lists(st.frozensets(st.integers(0, vocab_size - 1)), max_size=4))
    bits = unpack_bits(pack_masks(sets, vocab_size), vocab_size)
    assert bits.shape == (len(sets), vocab_size)
    assert [set(row.nonzero()[:, 0].tolist()) for row in bits] == [set(each) for each in sets]


@pytest.mark.parametrize(("vocab_size", "words"), [(1, 1), (32, 1), (33, 2), (49_152, 1536), (262_144, 8192)])
def test_a_mask_takes_one_bit_a_token(vocab_size: int, words: int) -> None:
    assert num_mask_words(vocab_size) == words


# A verified step with tensors of two devices. Torch's device `meta` stands in for a GPU.

VOCAB = 64


@pytest.mark.parametrize("name", ["cpu", "meta"])
def test_masks_on_the_host_serve_logits_on_a_device_and_follow_rows(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[Any, Any]] = []

    def sample(logits: Any, columns: Any, history: Any, positions: Any, allowed: Any) -> Sampled:
        asked.append((logits, allowed))
        return Sampled(torch.tensor([5, 9]))

    monkeypatch.setattr(runner.ops, "sample", sample)
    monkeypatch.setitem(device.MODULE_BY_NAME, "meta", "infer.compute.backends.torch_backend")
    columns = SamplingColumns.of([SamplingParams(temperature=0)] * 2, VOCAB, device=torch.device("cpu"))
    parts = [Chunk(0, [1, 5], num_drafts=1), Chunk(1, [2])]
    logits, masks = torch.zeros(3, VOCAB, device=name), torch.arange(6, dtype=torch.int32).reshape(3, 2)
    given = Masks(masks, np.ones(1, np.int64), lambda: None, lambda *_: False)
    drawn, ended, _ = runner.verify(logits, SampledStep(parts, [0, 0], columns, masks=given))
    assert drawn == [[5, 5], [9]]
    assert [(given.device.type, allowed.device.type) for given, allowed in asked] == [(name, name)] * 2
    if name == "cpu":
        assert (asked[0][1].tolist(), asked[1][1][0].tolist()) == ([[0, 1], [4, 5]], [2, 3])
    assert len(ended) == 2
    assert ended == sorted(ended)
