"""Fields of OpenAI's requests in a batch, each at the values that ask for least, and what its lines say of tokens."""

from typing import Any

import pytest

from infer.batch_file.openai_body import options_of_body, params_of_body
from infer.batch_file.openai_logprobs import LEAST_LOGPROB, Spelling, completion_columns, without_end
from infer.errors import InvalidRequestError
from infer.outputs import TokenLogprob


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({}, {}),
        ({"logprobs": None}, {}),
        ({"logprobs": False}, {}),
        ({"logprobs": True}, {"logprobs": 0}),
        ({"logprobs": True, "top_logprobs": None}, {"logprobs": 0}),
        ({"logprobs": True, "top_logprobs": 0}, {"logprobs": 0}),
        ({"logprobs": True, "top_logprobs": 1}, {"logprobs": 1}),
    ],
)
def test_a_chat_has_the_alternatives_that_it_asks_for_and_no_others(body: dict[str, Any], expected: object) -> None:
    assert params_of_body(body, is_chat=True) == expected


@pytest.mark.parametrize("body", [{"top_logprobs": 0}, {"logprobs": False, "top_logprobs": 2}, {"logprobs": 2}])
def test_alternatives_without_log_probabilities_are_refused_in_a_chat(body: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError, match="top_logprobs needs logprobs: true"):
        params_of_body(body, is_chat=True)


@pytest.mark.parametrize(("asked", "expected"), [(None, {}), (0, {"logprobs": 0}), (3, {"logprobs": 3})])
def test_a_completion_has_as_many_alternatives_as_its_number(asked: object, expected: object) -> None:
    assert params_of_body({"logprobs": asked}, is_chat=False) == expected


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({"thinking_token_budget": 5}, {"reasoning_budget": 5}),
        ({"thinking_token_budget": 0}, {"reasoning_budget": 0}),
        ({"thinking_token_budget": 5, "reasoning_effort": "none"}, {"reasoning_budget": 0}),
        ({"reasoning_effort": None}, {}),
        ({"tools": []}, {}),
    ],
)
def test_a_budget_of_none_is_none_and_of_0_is_0(body: dict[str, Any], expected: object) -> None:
    assert options_of_body(body) == expected


def test_of_tokens_with_one_text_the_likeliest_is_told() -> None:
    spelling = Spelling([b"a", b"b", b"a", b"\xc3", b"\xc3", b"a"], {5})
    chosen = TokenLogprob(5, -3.0, 3, ((1, -0.5), (0, -1.0), (2, -2.0), (3, float("-inf")), (4, -4.0)))
    columns = completion_columns([None, chosen], spelling)
    assert columns["tokens"] == [None, "a"]
    assert columns["token_logprobs"] == [None, -3.0]
    assert columns["top_logprobs"] == [None, {"b": -0.5, "a": -1.0, "bytes:\\xc3": -4.0}]
    never = TokenLogprob(1, float("-inf"), 6, ((3, float("-inf")),))
    assert completion_columns([never], spelling)["top_logprobs"] == [{"b": LEAST_LOGPROB, "bytes:\\xc3": LEAST_LOGPROB}]


def test_the_token_that_ends_an_answer_alone_is_no_part_of_it() -> None:
    logprobs = [TokenLogprob(token_id, -1.0, 1, ()) for token_id in range(3)]
    assert without_end(logprobs, "eos") == logprobs[:2]
    for reason in ("stop", "length", "abort", None):
        assert without_end(logprobs, reason) == logprobs
