"""The calls of `LLM` and sessions: one prompt or many, the same keywords everywhere, and the fields of a piece."""

import threading
from collections.abc import Iterator
from dataclasses import replace
from inspect import signature
from itertools import cycle, islice
from typing import Any

import pytest

from infer import LLM, InvalidRequestError, RequestOptions, SamplingParams, Session
from refusals import check_refused

GREEDY = SamplingParams(temperature=0, max_new_tokens=8, ignore_eos=True)
PROMPTS = ["hello", "abc abc abc", "go on", "b", "once upon a time"]


def test_a_list_of_texts_is_answered_with_a_list(llm: LLM) -> None:
    expected = [llm.generate(prompt, GREEDY).token_ids for prompt in PROMPTS]
    assert [result.token_ids for result in llm.generate(PROMPTS, GREEDY)] == expected
    assert [result.token_ids for result in llm.generate(tuple(PROMPTS), [GREEDY] * 5, speculation="ngram")] == expected


def test_all_prompts_of_a_list_are_checked_before_one_is_answered(llm: LLM) -> None:
    begun = list[tuple[int, int]]()
    with pytest.raises(InvalidRequestError, match="prompt 1: "):
        llm.generate_all(["a", [10**6]], GREEDY, on_progress=lambda *counts: begun.append(counts))
    assert begun == []


def test_prompts_are_taken_when_there_is_room_for_them_and_results_come_as_they_end(llm: LLM) -> None:
    taken, expected = list[str](), [llm.generate(prompt, GREEDY).token_ids for prompt in PROMPTS]

    def endless() -> Iterator[str]:
        for prompt in cycle(PROMPTS):
            taken.append(prompt)
            yield prompt

    found = llm.generate_iter(endless(), replace(GREEDY), batch_size=3)
    for count, (index, result) in enumerate(islice(found, 12), 1):
        assert result.token_ids == expected[index % len(PROMPTS)]
        assert len(taken) - count <= 2 * 3, "those that are answered, and as many that wait for their turn"
    found.close()  # type: ignore[attr-defined]  # it is a generator
    assert not llm._opened.engine.sequences, "what was under way has ended"


def test_a_prompt_that_cannot_be_answered_is_named_when_its_turn_comes(llm: LLM) -> None:
    check_refused(lambda: list(llm.generate_iter(iter(["a", [10**6]]), GREEDY, batch_size=1)), "prompt 1: ")
    assert not llm._opened.engine.sequences
    check_refused(lambda: llm.generate_iter("abc", GREEDY), "prompts must be a list or an iterable")
    check_refused(lambda: llm.generate_iter(["a"], GREEDY, batch_size=65), "batch_size must be")


@pytest.mark.parametrize("logprobs", [None, 2])
def test_pieces_carry_what_was_asked_for_and_the_last_one_why_it_ended(llm: LLM, logprobs: int | None) -> None:
    stream = llm.stream("hello", replace(GREEDY, logprobs=logprobs))
    pieces = list(stream)
    assert [piece.finish_reason for piece in pieces] == [None] * 7 + ["length"]
    assert [piece.token_id for piece in pieces] == stream.result.token_ids
    assert [piece.logprob for piece in pieces] == (stream.result.logprobs or [None] * 8)
    stopped = list(llm.stream("hello", replace(GREEDY, stop=[stream.result.text[2:4]])))
    assert stopped[-1].finish_reason == "stop"


OPTIONS: dict[str, Any] = {"speculation": "ngram", "num_draft_tokens": 3, "prefill_chunk": 7}
OPTIONS["overflow"] = "truncate_left"
MESSAGES = [{"role": "user", "content": "hello"}]


def test_every_call_takes_the_same_options(llm: LLM) -> None:
    def begun() -> Session:
        made = llm.session()
        made.append("hello")
        return made

    calls: dict[str, Any] = {
        "generate": lambda **k: llm.generate("hello", **k),
        "stream": lambda **k: llm.stream("hello", **k).result,
        "generate_all": lambda **k: llm.generate_all(["hello"], **k)[0],
        "generate_iter": lambda **k: next(iter(llm.generate_iter(["hello"], **k))).result,
        "chat": lambda **k: llm.chat(MESSAGES, **k),
        "stream_chat": lambda **k: llm.stream_chat(MESSAGES, **k).result,
        "send": lambda **k: llm.session().send("hello", **k),
        "session.stream": lambda **k: llm.session().stream("hello", **k).result,
        "answer": lambda **k: llm.session().answer(MESSAGES, **k),
        "session.generate": lambda **k: begun().generate(**k),
    }
    sampling = {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}
    for name, call in calls.items():
        plain = call(**sampling)
        assert len(plain.token_ids) == 8
        for options in (OPTIONS, {"options": RequestOptions(**OPTIONS)}):
            result = call(**sampling, **options)
            assert result.token_ids == plain.token_ids, name
            assert result.stats.prefill_steps >= plain.stats.prefill_steps, name
        with pytest.raises(InvalidRequestError, match="num_draft_tokens must be a whole number"):
            call(num_draft_tokens=0)
        cancelled = threading.Event()
        cancelled.set()
        assert call(**sampling, options=RequestOptions(cancel=cancelled)).finish_reason == "abort", name


def test_calls_that_wait_for_an_answer_take_both_callbacks() -> None:
    waiting = LLM.generate, LLM.chat, Session.send, Session.answer, Session.generate
    for call in (*waiting, LLM.stream, LLM.stream_chat, Session.stream):
        callbacks = {"on_token", "on_prefill"} if call in waiting else {"on_prefill"}
        assert callbacks | {"options"} <= set(signature(call).parameters), call


def test_keywords_change_the_options_that_are_given(llm: LLM) -> None:
    options = RequestOptions(prefill_chunk=3)
    long = "hello " * 6
    assert llm.generate(long, GREEDY, options=options).stats.prefill_steps == 11
    assert llm.generate(long, GREEDY, options=options, prefill_chunk=512).stats.prefill_steps == 0
