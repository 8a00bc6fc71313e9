"""Early ends: streams, sessions and models that are closed, also while another part of the program uses them."""

import asyncio
import copy
import gc
import os
import pickle
import threading
import time
import weakref
from collections.abc import Callable, Collection
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock, Mock

import pytest
from starlette.requests import ClientDisconnect

from infer import LLM, AsyncLLM, InvalidRequestError, SamplingParams, Stream
from infer.engine.requests.prompt_encoding import Conversation, TemplateProbes
from infer.engine.step.request_options import RequestOptions
from infer.engine.step.sequence import Sequence
from infer.errors import ClosedError
from infer.serving.server.endpoint import ApiRequest
from infer.serving.server.server_state import ServerState
from infer.serving.server_settings import ServerSettings
from looping import in_threads
from programs import Programs
from refusals import check_refused

LONG = SamplingParams(temperature=0, max_new_tokens=60, ignore_eos=True)
SHORT = replace(LONG, max_new_tokens=5)


@pytest.fixture(scope="module")
def llm(folder: Path) -> LLM:
    return LLM(folder, capture=False)


def is_idle(llm: LLM) -> bool:
    """Return True if no answer is active and none holds a slot."""
    engine = llm.host.engine
    return not engine.sequences and not list(engine._slots.sequences)


class Reader:
    """A thread that reads a stream. It has read the first piece, and the loop waits in the next step."""

    def __init__(self, stream: Stream, monkeypatch: pytest.MonkeyPatch) -> None:
        self.stream, self.error, self.pieces, accept = stream, None, list[Any](), stream.sequence.accept
        self.is_within, self.has_read, self.may_go = (threading.Event() for _ in range(3))

        def held_accept(*token: Any) -> Any:
            if len(stream.sequence.pieces) == 2:
                self.is_within.set()
                self.may_go.wait()
            return accept(*token)

        monkeypatch.setattr(stream.sequence, "accept", held_accept)
        self.thread = threading.Thread(target=self._read)
        self.thread.start()
        self.is_within.wait()
        self.has_read.wait()

    def _read(self) -> None:
        try:
            for piece in self.stream:
                self.pieces.append(piece)
                self.has_read.set()
        except BaseException as error:
            self.error = error


def close_while_read(stream: Stream, close: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> Reader:
    """Call `close` while another thread reads and the loop is within a step. The step continues after the call."""
    reader = Reader(stream, monkeypatch)
    closing = threading.Thread(target=close)
    closing.start()
    while stream.answer.loop.is_open and not stream.answer.is_dropped:
        time.sleep(0.001)
    assert closing.is_alive(), "it waits for the step under way"
    reader.may_go.set()
    closing.join()
    reader.thread.join()
    return reader


def test_a_stream_that_another_thread_closes_frees_the_session(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    session = llm.session()
    stream = session.stream("hello", LONG)
    reader = close_while_read(stream, stream.close, monkeypatch)
    assert reader.error is None
    assert 1 <= len(reader.pieces) <= 2
    assert stream.result.token_ids == [piece.token_id for piece in reader.pieces]
    assert (stream.result.finish_reason, stream.result.stop_reason) == ("abort", "cancelled")
    assert session.messages[-1] == {"role": "assistant", "content": stream.result.text}
    messages = [*session.messages, {"role": "user", "content": "go on"}]
    conversation = Conversation(llm.tokenizer, TemplateProbes(llm.tokenizer), RequestOptions(), {})
    expected = llm.generate(session._respell(conversation.encode(messages)), SHORT)
    assert session.send("go on", SHORT).token_ids == expected.token_ids


def test_a_stream_is_read_by_one_thread_at_a_time(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = llm.stream("hello", LONG)
    reader = Reader(stream, monkeypatch)
    try:
        check_refused(lambda: next(stream), "only one thread may read it at a time")
        check_refused(stream.run, "only one thread may read it at a time")
    finally:
        reader.may_go.set()
    reader.thread.join()
    assert (reader.error, len(reader.pieces)) == (None, 60)
    assert stream.result.token_ids == llm.generate("hello", LONG).token_ids


def test_a_callback_may_close_its_caller(llm: LLM) -> None:
    session, seen = llm.session(), list[int]()
    stream = session.stream("hello", LONG)

    def on_token(token_id: int, text: str) -> None:
        seen.append(token_id)
        if len(seen) == 4:
            stream.close()

    assert (stream.run(on_token).token_ids, len(seen)) == (seen, 4)
    assert session.send("go on", SHORT).generated_tokens == 5


@pytest.mark.parametrize("closes_elsewhere", [False, True])
def test_a_callback_of_the_prompt_may_close_the_stream(llm: LLM, closes_elsewhere: bool) -> None:
    """No thread waits for ever."""
    opened: list[Stream] = []

    def on_prefill(done: int, total: int) -> None:
        assert done < total
        if closes_elsewhere:
            in_threads([opened[0].close])
        else:
            opened[0].close()
            check_refused(lambda: next(opened[0]), "its own callbacks may not")
        assert is_idle(llm)

    opened.append(llm.stream([5] * 40, LONG, prefill_chunk=8, on_prefill=on_prefill))
    assert (list(opened[0]), opened[0].result.finish_reason) == ([], "abort")
    assert is_idle(llm)


def test_an_exception_of_a_callback_frees_everything(llm: LLM) -> None:
    fail = Mock(side_effect=KeyError("mine"))
    for call in (
        lambda: llm.generate("hello", LONG, on_token=fail),
        lambda: llm.generate([5] * 40, LONG, prefill_chunk=8, on_prefill=fail),
        lambda: llm.generate_all(["abc", "ab"], LONG, on_result=fail),
        lambda: llm.generate_all(["abc", "ab"], LONG, on_progress=fail),
    ):
        with pytest.raises(KeyError, match="mine"):
            call()
        assert is_idle(llm)


def test_a_program_that_ends_with_open_streams_ends_quietly(programs: Programs, folder: Path) -> None:
    code = f"""
from infer import LLM, SamplingParams
llm = LLM({str(folder)!r}, capture=False)
long = SamplingParams(temperature=0, max_new_tokens=60, ignore_eos=True)
streams = [llm.stream("hello", long), llm.session().stream("hello", long)]
for stream in streams:
    next(stream)
print("end")
"""
    done = programs.run(code)
    assert (done.returncode, done.stdout, done.stderr) == (0, "end\n", "")


# Slots that are idle


def test_a_burst_of_answers_leaves_nothing(llm: LLM) -> None:
    streams = [llm.stream("hello", LONG) for _ in range(6)]
    sessions = [llm.session() for _ in range(6)]
    for stream in streams:
        assert repr(stream) == "Stream(open, 0 tokens)"
        next(stream)
    for session in sessions:
        session.append("hello")
    lengths = llm.host.runner.lengths
    assert sum(length > 0 for length in lengths) >= 12
    for stream in streams:
        with stream:
            pass  # its end closes the stream
        assert (list(stream), repr(stream)) == ([], "Stream(abort, 1 tokens)")
    sessions[0].close()
    del stream, session, streams, sessions
    assert llm.generate("hello", SHORT).token_ids
    llm.trim()
    cache = llm.host.runner.cache
    cache.check_integrity()
    assert (any(lengths), cache.free_pages) == (False, cache.pool_pages)


def test_scores_of_a_prompt_begin_again_where_an_idle_session_held_the_pages(folder: Path) -> None:
    llm = LLM(folder, pool_pages=7)  # the pages of one full context
    token_ids = [5 + index % 50 for index in range(380)]
    expected = llm.prompt_logprobs(token_ids)
    session = llm.session()
    session.append(token_ids[:200])
    assert llm.prompt_logprobs(token_ids) == expected
    assert session.generate(SHORT).token_ids == llm.generate(token_ids[:200], SHORT).token_ids


@pytest.mark.parametrize(("taken", "turns"), [(range(1000), 19), ([], 19), ([13], 25)])
def test_scores_are_computed_between_steps_and_again_where_others_took_their_slot(
    folder: Path, taken: Collection[int], turns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others may take it after each part. 208 tokens are computed again in parts of 32 tokens."""
    llm = LLM(folder)
    monkeypatch.setattr("infer.engine.texts.token_trace.step_tokens", lambda host: 16)
    token_ids = [5 + index % 50 for index in range(300)]
    expected, engine, num_turns = llm.prompt_logprobs(token_ids, num=2), llm.host.engine, 0
    change = engine.change

    def change_and_trim(lease: Any, compute: Any) -> Any:
        nonlocal num_turns
        found, num_turns = change(lease, compute), num_turns + 1
        if num_turns in taken:
            engine.trim()
        return found

    monkeypatch.setattr(engine, "change", change_and_trim)
    assert (llm.prompt_logprobs(token_ids, num=2), num_turns) == (expected, turns)


# Models and sessions that are closed


def test_a_closed_model_refuses_every_call_in_one_line(folder: Path) -> None:
    llm = LLM(folder, capture=False)
    session, stream = llm.session(system="be brief"), llm.stream("hello", LONG)
    session.send("hello", SHORT)
    said = session.messages
    open_stream = session.stream("hello", LONG)
    next(open_stream)
    model, cache = weakref.ref(llm.model), weakref.ref(llm.host.runner.cache)
    with llm as same:
        assert same is llm
    llm.close()
    gc.collect()
    assert model() is cache() is None, "their memory is the system's again"
    assert stream.result.finish_reason == open_stream.result.finish_reason == "abort"
    assert [repr(each)[-9:] for each in (llm, session)] == [", closed)"] * 2
    assert session.messages[: len(said)] == said
    of_model = {"generate": "a", "stream": "a", "generate_all": ["a"], "chat": said, "load_session": "a"}
    of_model |= {"prompt_logprobs": "a", "sample_trace": "a", "logits": [1], "embed": ["a"]}
    of_session = {"send": "a", "stream": "a", "answer": said, "append": "a", "rewind": 0, "save": "a", "load": "a"}
    calls = [(partial(getattr(llm, name), argument), "model") for name, argument in of_model.items()]
    calls += [(partial(getattr(session, name), argument), "session") for name, argument in of_session.items()]
    calls += [(partial(getattr, llm, name), "model") for name in ("model", "tokenizer", "max_seq_len", "can_chat")]
    calls += [
        (llm.session, "model"),
        (llm.__enter__, "model"),
        (session.generate, "session"),
        (session.fork, "session"),
    ]
    for call, kind in calls:
        check_refused(call, f"^the {kind} is closed: ", ClosedError)


def test_answers_under_way_end_when_their_model_is_closed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = LLM(folder, capture=False)
    stream = llm.session().stream("hello", LONG)
    assert close_while_read(stream, llm.close, monkeypatch).error is None
    assert stream.result.finish_reason == "abort"
    llm = LLM(folder, capture=False)
    longer = [replace(LONG, max_new_tokens=count) for count in (5, 300, 300)]
    found = llm.generate_all(["hello"] * 3, longer, batch_size=2, on_progress=lambda done, total: llm.close())
    assert [result.finish_reason for result in found] == ["length", "abort", "abort"]


def test_a_callback_may_close_the_model(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = LLM(folder, capture=False)
    result = llm.generate("hello", LONG, on_token=lambda token_id, text: llm.close())
    assert (result.finish_reason, len(result.token_ids)) == ("abort", 1)
    llm, is_closing, accept = LLM(folder, capture=False), threading.Event(), Sequence.accept

    def held_accept(*given: Any) -> Any:
        is_closing.wait()
        time.sleep(0.005)  # else the answer ends before a busy machine goes on with the callback
        return accept(*given)

    def close(done: int, total: int) -> None:
        is_closing.set()
        llm.close()

    monkeypatch.setattr(Sequence, "accept", held_accept)
    result = llm.generate([5] * 40, LONG, prefill_chunk=8, on_prefill=close)
    assert (result.finish_reason, len(result.token_ids) < LONG.max_new_tokens) == ("abort", True)
    with pytest.raises(ClosedError):
        llm.generate("hello")


def test_a_closed_session_gives_its_slot_back(llm: LLM) -> None:
    with llm.session() as session:
        session.append("hello")
        slot = session._cache.lease.slot
        assert llm.host.runner.lengths[slot] == 5
    llm.trim()
    assert llm.host.runner.lengths[slot] == 0
    session.close()
    kept = llm.session()
    kept.append("hello")
    assert kept.num_cached_tokens == 5
    kept.close()
    assert kept.num_cached_tokens == 0
    kept = llm.session()
    stream = kept.stream("hello", LONG)
    next(stream)
    kept.close()
    assert (stream.result.finish_reason, len(kept.messages)) == ("abort", 2)


def test_models_sessions_and_streams_are_not_copied(llm: LLM) -> None:
    reasons = {llm: "load it again", llm.session(): r"fork\(\) copies it", llm.stream("a"): "a running answer"}
    for (thing, instead), way in product(reasons.items(), (copy.copy, copy.deepcopy, pickle.dumps)):
        with pytest.raises(TypeError, match=instead):
            way(thing)


def test_a_forked_child_does_not_wait_for_a_reader_that_it_lacks(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = llm.stream("hello", LONG)
    reader = Reader(stream, monkeypatch)
    pid = os.fork()
    if pid == 0:
        stream.close()
        os._exit(7)
    reader.may_go.set()
    reader.thread.join()
    assert (os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), len(reader.pieces)) == (7, 60)


# Models that are closed while others use them


ANSWER = SamplingParams(temperature=0, max_new_tokens=400, ignore_eos=True)


@pytest.fixture
def shared(folder: Path) -> AsyncLLM:
    return AsyncLLM(folder)


def test_a_server_whose_model_is_closed_continues_and_reports_the_failure(shared: AsyncLLM) -> None:
    state = ServerState(ServerSettings())
    state.become_ready(shared)
    state.tick(0.0)
    assert state.phase == "ready"
    shared.llm.close()
    state.tick(0.0)
    assert (state.phase, str(state.failure)) == ("failed", "the model was closed")
    assert (state.step_began, state.has_engine_failed) == (None, False)


def test_a_thread_that_prepares_a_request_sees_that_the_model_closes(shared: AsyncLLM) -> None:
    shared.host.close()
    with pytest.raises(ClosedError):
        _ = shared.host.system_fingerprint


def test_no_answer_continues_after_the_error_that_ends_all(shared: AsyncLLM) -> None:
    refuse = Mock(side_effect=InvalidRequestError("enough"))
    params = [SamplingParams(max_new_tokens=1), ANSWER]

    async def ask() -> list[Any]:
        before = asyncio.all_tasks()
        with pytest.raises(InvalidRequestError, match="enough"):
            await shared.generate_all(["a", "b"], params, batch_size=2, on_result=refuse)
        return [task for task in asyncio.all_tasks() - before if not task.done()]

    assert asyncio.run(ask()) == []
    shared.llm.close()


def test_errors_for_a_disconnected_client_are_not_logged() -> None:
    logged, gone = list[Any](), Mock(receive=AsyncMock(return_value={"type": "http.disconnect"}))

    async def fail_when_cancelled() -> None:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            raise RuntimeError("nobody asks") from None

    async def ask() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: logged.append(context))
        with pytest.raises(ClientDisconnect):
            await ApiRequest.while_connected(gone, fail_when_cancelled())
        await asyncio.sleep(0.01)
        gc.collect()

    asyncio.run(ask())
    assert logged == []
