"""`Session` on a tiny random model: an answer depends only on its ids, not on earlier turns or their removal."""

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import DEFAULT, Mock

import pytest
import torch
from transformers import LlamaConfig

from byte_tokenizer import VOCAB_SIZE, write_byte_tokenizer
from cases import cases
from infer import LLM, InvalidRequestError, SamplingParams, Session, Stream
from infer.compute.kvcache.paged import PagedCache
from infer.engine.session.transcript import keep_spelling
from infer.engine.step.sequence import Sequence as Answering
from infer.errors import ContextLengthError
from infer.outputs import GenerationResult
from refusals import check_refused, refusal
from tiny import Tiny, make_tiny

CONTEXT = 400
NUM_TOKENS = VOCAB_SIZE + 2
TEXT_IDS = [*range(32, 124), 256, 257]  # whole characters, without the bar that the template searches
GREEDY_VALUES: dict[str, Any] = {"temperature": 0, "max_new_tokens": 12, "allowed_token_ids": TEXT_IDS}
SAMPLED_VALUES = GREEDY_VALUES | {"temperature": 1.0, "top_k": 40, "repetition_penalty": 1.2, "seed": 7}
GREEDY, SAMPLED = SamplingParams(**GREEDY_VALUES), SamplingParams(**SAMPLED_VALUES)
BOTH = pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
TEMPLATE = (
    "{% for message in messages %}[{{ message.role }}]"
    "{{ message.content.split('|')[-1] if message.role == 'assistant' else message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{{ prefix }}{% endif %}"
)


def make_model(folder: Path, *, num_layers: int = 2, context: int = CONTEXT, **tokenizer: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    config = LlamaConfig(
        vocab_size=NUM_TOKENS + 4, hidden_size=64, intermediate_size=128, num_hidden_layers=num_layers,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=context, bos_token_id=None,
        eos_token_id=NUM_TOKENS - 2,
    )  # fmt: skip
    make_tiny(Tiny("bytes", config), folder)
    write_byte_tokenizer(folder, merges=[("a", "b"), ("e", " ")], chat_template=TEMPLATE, **tokenizer)
    return folder


def check_fresh(llm: LLM, prompt: list[int], params: SamplingParams, result: GenerationResult) -> None:
    """Check that a newly loaded model gives the same answer."""
    fresh = llm.generate(prompt, params)
    assert (result.token_ids, result.text, result.prompt_tokens) == (fresh.token_ids, fresh.text, len(prompt))


def check_turn(llm: LLM, session: Session, text: str, params: SamplingParams = GREEDY, **options: Any) -> Any:
    """Send a turn, and check its answer by that of a newly loaded model to all tokens of the session."""
    result = session.send(text, params, **options)
    check_fresh(llm, session.token_ids[: -len(result.token_ids)], params, result)
    return result


@BOTH
def test_turns_answer_as_one_long_prompt_and_run_only_new_tokens(llm: LLM, params: SamplingParams) -> None:
    session = llm.session(system="be brief")
    chat = llm.chat([{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}], params)
    for text in ("hello", "and now", "one more"):
        cached = session.num_cached_tokens
        result = check_turn(llm, session, text, params)
        assert text != "hello" or result.token_ids == chat.token_ids
        assert (result.reused_tokens, result.dropped_tokens) == (cached, 0)
    assert [message["role"] for message in session.messages] == ["system", *["user", "assistant"] * 3]


@BOTH
def test_appended_ids_are_a_prompt(llm: LLM, params: SamplingParams) -> None:
    session = llm.session()
    for part in ("once upon", [], list(b" a time")):
        session.append(part)
    result = session.generate(params)
    check_fresh(llm, llm.tokenizer.encode("once upon") + list(b" a time"), params, result)
    assert result.reused_tokens == result.prompt_tokens - 1
    going_on = session.generate(params)
    check_fresh(llm, session.token_ids[: -len(going_on.token_ids)], params, going_on)


def test_with_a_template_that_drops_thoughts_the_shared_part_is_kept(llm: LLM) -> None:
    """This template keeps only the text after an answer's last bar."""
    session = llm.session()
    first = session.send("hello", SamplingParams(temperature=0, max_new_tokens=30))
    messages = session.messages
    messages[-1]["content"] = "thought|" + messages[-1]["content"]
    for asked in (messages, [*messages, {"role": "user", "content": "next"}]):
        result = session.answer(asked, GREEDY)
        prompt = session.token_ids[: -len(result.token_ids)]
        check_fresh(llm, prompt, GREEDY, result)
        assert llm.tokenizer.decode(prompt, False) == llm.tokenizer.render_chat_template(asked)
    session = llm.session(prefix="thought|")
    session.send("hello", GREEDY)
    cached = session.num_cached_tokens
    result = check_turn(llm, session, "next")
    num_question = len(llm.tokenizer.encode_chat([{"role": "user", "content": "hello"}]))
    assert result.reused_tokens == num_question
    assert result.dropped_tokens == cached - num_question > 0
    assert first.dropped_tokens == 0


def test_an_answer_keeps_the_spelling_in_which_it_was_said(llm: LLM) -> None:
    """The tokenizer would write "ab" as one token."""
    session = llm.session()
    session.send("hello", SamplingParams(temperature=0, max_new_tokens=2, allowed_token_ids=[ord("a")]))
    said = session.generate(SamplingParams(temperature=0, max_new_tokens=1, allowed_token_ids=[ord("b")]))
    assert said.reused_tokens == said.prompt_tokens - 1
    messages = session.messages
    messages[-1]["content"] = "aab"
    result = session.answer([*messages, {"role": "user", "content": "ab"}], GREEDY)
    assert result.dropped_tokens == 0
    assert list(b"aab") == session.token_ids[result.reused_tokens - 2 : result.reused_tokens + 1]
    prompt = llm.tokenizer.decode(session.token_ids[: result.prompt_tokens], False)
    assert prompt.endswith("[assistant]aab<|im_end|>\n[user]ab<|im_end|>\n[assistant]")
    check_fresh(llm, session.token_ids[: result.prompt_tokens], GREEDY, result)


BYTES = (b"a", b"b", b"ab", b"ba", b"aba", b"<c>", b"")
CONTROL = 5


@cases(
    "said rendered expected",
    ([0, 1, 0], [2, 0, 3], [0, 1, 0, 3]),  # a b a = ab a
    ([2, 0, 3], [4, 1, 0, 1], [2, 0, 3, 1]),  # ab a ba = aba b a
    ([2, 3], [4, 1, 0], [4, 1, 0]),  # abba is not ababa
    ([0, 5, 0], [0, 5, 1], [0, 5, 1]),
    ([0, 0], [0, 5], [0, 5]),
    ([6, 0], [0, 1], [0, 1]),  # a token of no bytes is not skipped
    ([], [0], [0]),
    ([0], [], []),
    ([4], [0, 1], [0, 1]),  # aba is longer than what is rendered
    ([99, 0], [0, 0], [0, 0]),
)
def test_spellings_agree_where_bytes_and_control_tokens_do(said: Any, rendered: Any, expected: Any) -> None:
    assert keep_spelling(said, rendered, BYTES, {CONTROL}) == expected


# Errors


@pytest.mark.parametrize("num_tokens", [0, 1, 5])
def test_a_stopped_answer_is_kept_and_the_session_continues(llm: LLM, num_tokens: int) -> None:
    session, cancel, left = llm.session(), threading.Event(), iter(range(num_tokens - 1))
    session.send("hello", GREEDY)
    before = session.token_ids, session.messages

    def on_token(*token: object) -> None:
        if next(left, None) is None:
            cancel.set()

    if num_tokens == 0:
        cancel.set()
    result = session.send("tell me more", GREEDY, on_token=on_token, cancel=cancel)
    assert (result.finish_reason, len(result.token_ids)) == ("abort", num_tokens)
    if num_tokens == 0:
        assert (session.token_ids, session.messages) == before
    else:
        assert session.messages[-1] == {"role": "assistant", "content": result.text}
    check_turn(llm, session, "go on")


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_an_exception_while_answering_leaves_a_session_that_goes_on(llm: LLM, error: type[BaseException]) -> None:
    session, fail = llm.session(), Mock(side_effect=error)
    for call in (lambda: session.send("hello", GREEDY, on_token=fail), lambda: session.generate(GREEDY, on_token=fail)):
        with pytest.raises(error):
            call()
    session.rewind(len(session.token_ids))
    check_turn(llm, session, "go on")


def test_a_session_goes_on_after_a_fault_while_ids_are_appended(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    session, runner = llm.session(), llm.host.runner
    session.append("hello")
    limits = runner.model.step_limits._replace(tokens=4)
    monkeypatch.setattr(runner, "model", replace(runner.model, step_limits=limits))
    forward = Mock(wraps=runner.forward, side_effect=[DEFAULT, MemoryError, *[DEFAULT] * 99])
    monkeypatch.setattr(runner, "forward", forward)
    with pytest.raises(MemoryError):
        session.append(" and more than four")
    assert session.token_ids == llm.tokenizer.encode("hello")
    assert not session._cache.lease.token_ids, "what stood there is not known"
    session.append(" and more than five")
    check_fresh(llm, session.token_ids, GREEDY, session.generate(GREEDY))


@pytest.mark.parametrize("num_read", [0, 1, 4])
@pytest.mark.parametrize("way", ["close", "drop"])
def test_a_stream_that_is_left_early_frees_the_session(llm: LLM, num_read: int, way: str) -> None:
    session = llm.session()
    stream = session.stream("hello", GREEDY)
    for _ in range(num_read):
        next(stream)
    for call in (lambda: session.send("x"), session.fork, lambda: session.rewind(0), lambda: session.append([1])):
        with pytest.raises(InvalidRequestError, match="is answering"):
            call()
    if way == "close":
        stream.close()
    del stream
    assert len(session.messages) == (2 if num_read else 0)
    check_turn(llm, session, "go on")


def test_the_second_thread_that_enters_a_session_is_refused(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each thread pauses after it has seen that the session is free, until the other has seen it or is refused."""
    session, both_have_seen = llm.session(), threading.Barrier(2)

    def caller(asked: Any) -> object:
        found = vars(asked)["_caller"]
        if found is None:
            with suppress(threading.BrokenBarrierError):
                both_have_seen.wait(0.5)
        return found

    def begin(number: int) -> object:
        try:
            return session.stream("hello", GREEDY)
        except InvalidRequestError as error:
            return str(error)

    with monkeypatch.context() as patch, ThreadPoolExecutor(2) as pool:
        change = property(caller, lambda asked, found: vars(asked).update(_caller=found))
        patch.setattr(Session, "_caller", change, raising=False)
        found = list(pool.map(begin, range(2)))
    assert sorted(type(each).__name__ for each in found) == ["Stream", "str"]
    (stream,) = (each for each in found if isinstance(each, Stream))
    assert stream.run().token_ids == llm.chat([{"role": "user", "content": "hello"}], GREEDY).token_ids


@pytest.mark.parametrize("has_fault", [False, True], ids=["logits", "fault after four tokens"])
def test_a_turn_that_fails_changes_no_session(llm: LLM, has_fault: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    session, accept = llm.session(), Answering.accept
    session.send("hello", GREEDY)
    before = session.token_ids, session.messages
    nothing = SamplingParams(temperature=0, allowed_token_ids=[65], logit_bias={65: -float("inf")})
    params = GREEDY if has_fault else nothing

    def fail(running: Answering, *token: Any) -> Any:
        if has_fault and len(running.pieces) == 4:
            raise ZeroDivisionError
        return accept(running, *token)

    with monkeypatch.context() as patch:
        patch.setattr(Answering, "accept", fail)
        for call in (lambda: session.send("fail", params), lambda: session.generate(params)):
            failed, again = call(), call()
            assert failed.finish_reason == again.finish_reason == "error"
            assert failed.reused_tokens == again.reused_tokens or has_fault, "what failed is not there to be reused"
            assert (session.token_ids, session.messages) == before
    check_turn(llm, session, "go on")


def test_a_grammar_and_drafts_hold_in_a_session(llm: LLM) -> None:
    session = llm.session()
    for params in (SamplingParams(temperature=0, regex="yes(, yes){3}!?"), SAMPLED, GREEDY):
        check_turn(llm, session, "say ab ab ab ab", params, speculation="ngram")


def test_later_changes_of_messages_do_not_affect_the_session(llm: LLM) -> None:
    session = llm.session()
    mine: dict[str, Any] = {"role": "user", "content": "hello", "extra": ["a"]}
    session.send(mine, GREEDY)
    mine["extra"].append("b")
    session.messages[0]["extra"].append("c")
    assert session.messages[0] == {"role": "user", "content": "hello", "extra": ["a"]}


def test_a_refused_turn_changes_nothing(llm: LLM) -> None:
    session = llm.session()
    session.send("hello", GREEDY)
    before = session.token_ids, session.messages, session.num_cached_tokens
    too_long = [lambda: session.send("x" * CONTEXT, GREEDY), lambda: session.append([1] * CONTEXT)]
    wrong = [lambda: session.send("\ud800", GREEDY), lambda: session.send("x", GREEDY, speculation="magic")]
    wrong += [lambda: session.append([NUM_TOKENS + 4]), lambda: session.rewind(-1), lambda: session.rewind(CONTEXT)]
    for call in (*too_long, *wrong):
        refusal(call, ContextLengthError if call in too_long else InvalidRequestError)
    assert (session.token_ids, session.messages, session.num_cached_tokens) == before
    session.append("raw")
    check_refused(lambda: session.send("x", GREEDY), r"rewind\(3\)")


def test_rewinding_forgets_the_turns_it_cuts_and_their_messages(llm: LLM) -> None:
    session = llm.session(system="be brief")
    session.send("hello", GREEDY)
    first = session.token_ids, session.messages
    again = session.send("and now", GREEDY)
    session.rewind(1)
    assert session.messages == first[1]
    session.rewind(len(session.token_ids) - len(first[0]))
    assert (session.token_ids, session.messages) == first
    assert session.send("and now", GREEDY).token_ids == again.token_ids
    session.rewind(len(session.token_ids))
    assert session.messages == [{"role": "system", "content": "be brief"}]


@BOTH
def test_a_fork_goes_its_own_way(llm: LLM, params: SamplingParams) -> None:
    session = llm.session()
    session.send("hello", params)
    other = session.fork()
    assert (other.token_ids, other.messages) == (session.token_ids, session.messages)
    for each, text in ((session, "left"), (other, "right"), (session, "left again"), (other, "right again")):
        result = check_turn(llm, each, text, params)
        assert result.reused_tokens > result.dropped_tokens == 0
    assert session.messages != other.messages
    third, before = other.fork(), other.num_cached_tokens
    third.rewind(len(third.token_ids))
    assert other.num_cached_tokens == before


def test_a_prompts_logprobs_are_those_of_its_logits(llm: LLM) -> None:
    prompt = llm.tokenizer.encode("the ab " * 28)
    expected = torch.log_softmax(llm.logits(prompt)[:, : llm.tokenizer.vocab_size].double(), -1)
    first, *found = llm.prompt_logprobs(prompt, num=3)
    assert first is None
    assert len(found) == len(prompt) - 1 > 128
    for index, entry in enumerate(found):
        assert entry.token_id == prompt[index + 1]
        assert entry.logprob == pytest.approx(float(expected[index, entry.token_id]), abs=1e-6)
        assert entry.rank == 1 + int((expected[index] > expected[index, entry.token_id]).sum())
        assert [token_id for token_id, _ in entry.top] == expected[index].topk(3).indices.tolist()
    assert llm.prompt_logprobs([5]) == [None]
    for prompt, num in (([5, NUM_TOKENS + 3], 0), ([5], 21), ([5], -1), ([CONTEXT] * 3, 0), ([5] * (CONTEXT + 1), 0)):
        with pytest.raises(InvalidRequestError):
            llm.prompt_logprobs(prompt, num=num)


def test_a_cache_that_differs_from_the_session_is_an_error(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    session = llm.session()
    session.send("hello", GREEDY)
    with monkeypatch.context() as patch:
        patch.setattr(PagedCache, "truncate", lambda self, row, length: None)
        with pytest.raises(RuntimeError, match=r"the cache has \d+ tokens, expected \d+"):
            session.rewind(3)
    session.rewind(3)
