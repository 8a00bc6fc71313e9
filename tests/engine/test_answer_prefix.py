"""`answer_prefix`: an answer that begins with given ids continues with the bits of one that sampled them."""

import asyncio
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from cases import cases
from infer import LLM, AsyncLLM, SamplingParams
from refusals import check_refused
from test_session import GREEDY, SAMPLED

PENALTIES: dict[str, Any] = {"frequency_penalty": 0.8, "presence_penalty": 0.5, "min_new_tokens": 9, "stop": "zq"}
CASES = [GREEDY, SAMPLED, replace(SAMPLED, **PENALTIES, max_new_tokens=30)]
CASES += [SamplingParams(regex="[a-f ]{20}", seed=4), replace(SAMPLED, logprobs=2)]


@pytest.mark.slow(cases=3)
@pytest.mark.parametrize("params", CASES)
@pytest.mark.parametrize("speculation", [None, "ngram"])
def test_from_any_token_on_the_answer_is_the_same(llm: LLM, params: SamplingParams, speculation: Any) -> None:
    whole = llm.generate("hello", params)
    for count in range(len(whole.token_ids)):
        found = llm.generate("hello", params, answer_prefix=whole.token_ids[:count], speculation=speculation)
        assert (found.token_ids, found.text) == (whole.token_ids, whole.text)
        assert (found.finish_reason, found.stop_reason) == (whole.finish_reason, whole.stop_reason)
        if whole.logprobs is not None:
            assert found.logprobs == whole.logprobs[count:]


def test_another_token_makes_another_answer_with_the_same_beginning(llm: LLM) -> None:
    whole = llm.generate("hello", SAMPLED)
    other = [*whole.token_ids[:4], whole.token_ids[4] ^ 1]
    pieces = list(llm.stream("hello", SAMPLED, answer_prefix=other))
    found = llm.generate("hello", SAMPLED, answer_prefix=tuple(other))
    assert (found.token_ids[:5], len(found.token_ids), len(whole.token_ids)) == (other, 12, 12)
    said = [piece.token_id for piece in pieces], "".join(piece.text for piece in pieces)
    assert said == (found.token_ids, found.text)


@cases(
    "values prefix message",
    ({}, "abc", "answer_prefix must be a list of token ids, got 'abc'"),
    ({}, [1, -1], "answer_prefix: token ids must be from 0 to"),
    ({}, [97, True], "answer_prefix: token ids must be whole numbers"),
    ({"max_new_tokens": 2}, [97, 98, 99], r"answer_prefix\[1\]: the answer ends with this token \(length"),
    ({"stop": "b"}, [97, 98], r"answer_prefix\[1\]: the answer ends with this token \(stop, 'b'\)"),
    ({"regex": "[a-f]{9}"}, [97, 122], r"answer_prefix\[1\]: the grammar does not allow token 122 there"),
)
def test_a_prefix_that_no_answer_can_continue_is_refused(llm: LLM, values: Any, prefix: Any, message: str) -> None:
    check_refused(lambda: llm.generate("hello", answer_prefix=prefix, **values), message)


@pytest.mark.parametrize("params", [GREEDY, SAMPLED, replace(SAMPLED, **PENALTIES)])
def test_the_trace_of_an_answer_is_that_of_each_of_its_tokens(llm: LLM, params: SamplingParams) -> None:
    trace = partial(AsyncLLM(llm).trace, "hello", params, num_candidates=5)
    result, traces = asyncio.run(trace())
    assert result.token_ids == llm.generate("hello", params).token_ids
    expected = [llm.sample_trace("hello", params, step=step + 1, num_candidates=5) for step in range(len(traces))]
    assert traces == [replace(each, text_before="") for each in expected]
    _, rest = asyncio.run(trace(answer_prefix=result.token_ids[:3]))
    assert rest == traces[3:]


@pytest.mark.parametrize("grammar", [{"regex": "[ab]{3}c"}, {"choice": ["aab", "bba"]}])
def test_an_answer_with_a_grammar_is_traced_too(llm: LLM, grammar: Any) -> None:
    params = SamplingParams(**grammar, seed=1, max_new_tokens=8)
    result, traces = asyncio.run(AsyncLLM(llm).trace("hello", params, num_candidates=5))
    assert result.token_ids == llm.generate("hello", params).token_ids == [each.token_id for each in traces]
    assert traces[1] == replace(llm.sample_trace("hello", params, step=2, num_candidates=5), text_before="")
    assert {stage.name for stage in traces[0].stages} >= {"raw", "allowed"}
