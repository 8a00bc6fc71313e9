"""The thread that steps the engine. In a loop, it takes messages, and runs a step and a part of a call."""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import ExitStack, suppress
from itertools import chain
from queue import Empty
from typing import NamedTuple, final

import torch

from infer.compute.ops import Backend
from infer.engine.engine import Engine
from infer.engine.requests.answer import Answer, Relay
from infer.engine.requests.loop_messages import (
    Backlog,
    Cancel,
    Close,
    Continue,
    Drain,
    Drop,
    EngineCall,
    Inbox,
    Message,
    Own,
    Refill,
    Reply,
    Submit,
    refuse_all,
)
from infer.engine.step.sequence import Sequence
from infer.errors import EngineFailedError, InferError, closed

_POLL_SECONDS = 0.1  # between checks while all answers pause, because one may time out or be cancelled by its event


class Heartbeat(NamedTuple):
    """The last sign of life, in seconds of `time.monotonic`. A thread that is not stepping has nothing to do."""

    seconds: float
    is_stepping: bool


@final
class Status:
    """State of the thread that other threads read."""

    def __init__(self) -> None:
        self.num_sequences = 0  # that are active
        self.heartbeat = Heartbeat(time.monotonic(), is_stepping=False)
        self.refusal: Callable[[], InferError] | None = None  # the error for every new sequence
        self.failure: BaseException | None = None  # the exception that ended the engine for good
        self.is_over = False  # the thread takes no more messages


def serve(inbox: Inbox, status: Status) -> None:
    """Run the thread until a message says that no others will arrive."""
    with ExitStack() as held:
        _EngineThread(inbox, status, held).run()


@final
class _EngineThread:
    def __init__(self, inbox: Inbox, status: Status, held: ExitStack) -> None:
        """Begin without an engine. `held` is closed at the thread's end."""
        self._inbox, self._status, self._held = inbox, status, held
        self._engine: Engine | None = None
        self._answers: dict[Sequence, Answer] = {}  # of the active sequences
        self._backlogs: dict[Sequence, Backlog] = {}  # of the active sequences that came from a backlog
        self._calls = deque[EngineCall]()  # calls that have not begun
        self._begun_calls = deque[EngineCall]()  # the first one continues when no other call must begin
        self._debts: dict[str, float] = {}  # seconds of steps that others are owed for a tenant's calls
        self._draining = list[Reply[None]]()
        self._why_failed = ""
        self._is_closed = False

    def run(self) -> None:
        try:
            while not self._is_closed:
                try:
                    if not (self._calls or self._begun_calls):  # calls that a fault left behind
                        self._take(self._inbox.get())
                    self._run_until_idle()
                except BaseException as error:  # a fault of this module
                    self._fail(error)
        finally:
            self._finish()

    def _run_until_idle(self) -> None:
        """Run steps and calls until none are left."""
        while not self._is_closed and (self._answers or self._calls or self._begun_calls):
            if self._engine is not None:
                self._engine.listen()  # before the inbox is read: messages that arrive later interrupt the step
            while not self._inbox.empty():
                self._take(self._inbox.get())
            has_stepped = self._step()
            if not has_stepped:  # the others only wait
                self._debts.clear()
            if (call := self._next_call()) is not None:
                self._advance(call)
            elif self._answers and not (has_stepped or self._is_closed):
                try:  # all answers pause
                    self._take(self._inbox.get(timeout=_POLL_SECONDS))
                except Empty:
                    self._cancel_unread()

    # Messages

    def _take(self, message: Message) -> None:
        match message:
            case Own(engine, backend):
                self._own(engine, backend)
            case Submit(answer):
                self._begin(answer)
            case Refill(backlog):
                self._refill(backlog)
            case Drop(backlog):
                self._drop(backlog)
            case Cancel(answer):
                if answer.sequence in self._answers:
                    self._open_engine.cancel(answer.sequence)
                else:
                    answer.end()
            case Continue(answer) if answer.sequence in self._answers:
                answer.sequence.is_streamed = not answer.only_end
                self._open_engine.proceed(answer.sequence)
            case EngineCall():
                self._calls.append(message)
            case Drain(reply):
                self._draining.append(reply)
                self._count()
            case Close():
                self._is_closed = True

    @property
    def _open_engine(self) -> Engine:
        assert self._engine is not None
        return self._engine

    def _own(self, engine: Engine | None, backend: Backend) -> None:
        """Step this engine from now on. On this thread, torch always computes with one thread."""
        self._engine = engine
        self._held.enter_context(backend.threads())
        self._held.enter_context(torch.inference_mode())

    def _begin(self, answer: Answer) -> None:
        sequence = answer.sequence
        if self._status.failure is not None:
            answer.fail(self._status.failure, self._why_failed)
        if self._status.failure is not None or self._is_closed or sequence.has_ended:
            answer.end()
            return
        sequence.is_streamed = not answer.only_end
        self._answers[sequence] = answer
        self._open_engine.submit(sequence, answer.lease)
        self._count()

    def _refill(self, backlog: Backlog) -> None:
        while backlog.num_running < backlog.most_running and backlog.waiting:
            answer = backlog.waiting.popleft()
            backlog.num_running += 1
            self._backlogs[answer.sequence] = backlog
            self._begin(answer)

    def _drop(self, backlog: Backlog) -> None:
        backlog.end_waiting()
        for sequence, its in self._backlogs.items():
            if its is backlog:
                self._open_engine.cancel(sequence)

    def _count(self) -> None:
        self._status.num_sequences = len(self._answers)
        if not self._answers:
            for reply in self._draining:
                reply.set(None)
            self._draining.clear()

    # Steps

    def _step(self) -> bool:
        """Run a step if there is work."""
        engine, status = self._engine, self._status
        if engine is None or not self._answers or self._is_closed:
            return False
        status.heartbeat = Heartbeat(began := time.monotonic(), is_stepping=True)
        engine.resting_tenants = self._debts.keys()
        try:
            sequences = engine.step()
        except Exception as error:
            try:
                engine.recover_from(error)
            except Exception as last:
                self._fail(last)
            return True
        finally:
            status.heartbeat = Heartbeat(ended := time.monotonic(), is_stepping=False)
        debts = {tenant: owed - (ended - began) for tenant, owed in self._debts.items()}
        self._debts = {tenant: owed for tenant, owed in debts.items() if owed > 0}
        self._deliver(sequences)
        return bool(sequences)

    def _deliver(self, sequences: Iterable[Sequence]) -> None:
        """Give the new pieces of these sequences to their answers, and call each event loop once."""
        relays = set[Relay]()
        for sequence in sequences:
            answer = self._answers[sequence]
            answer.put()
            if sequence.has_ended:
                del self._answers[sequence]
                if (backlog := self._backlogs.pop(sequence, None)) is not None:
                    backlog.num_running -= 1
                    self._refill(backlog)
            if answer.relay is not None:
                relays.add(answer.relay)
            if not sequence.has_ended and answer.pause_if_full():
                self._open_engine.pause(sequence)
        for relay in relays:
            try:
                relay.call()
            except RuntimeError:  # its event loop is closed
                self._cancel_unread()
        self._count()

    def _cancel_unread(self) -> None:
        """End the answers whose event loop is closed, because nothing can read them."""
        for sequence, answer in self._answers.items():
            if answer.relay is not None and answer.relay.event_loop.is_closed():
                self._open_engine.cancel(sequence)

    def _next_call(self) -> EngineCall | None:
        """Take out the call that continues, or return None. A call whose tenant owes steps to others waits.

        A call that does not give way also stops the calls behind it.
        """
        for calls in (self._calls, self._begun_calls):
            for call in calls:
                if call.tenant not in self._debts or call.reply.is_cancelled:
                    calls.remove(call)
                    return call
                if not call.gives_way:
                    break
        return None

    def _advance(self, call: EngineCall) -> None:
        """Run the next part of a call. Each other tenant with answers is owed steps for as long."""
        others, began = {each.tenant for each in self._answers} - {call.tenant}, time.monotonic()
        try:
            if call.reply.is_cancelled:
                call.work.close()
                call.reply.set(error=InferError("the call was cancelled"))
                return
            gives_way = bool(next(call.work))
        except StopIteration as ended:
            call.reply.set(ended.value)
        except BaseException as error:
            call.reply.set(error=error)
        else:
            call.gives_way = gives_way or not call.has_begun
            if call.gives_way:
                self._begun_calls.append(call)
            else:
                self._begun_calls.appendleft(call)
            call.has_begun = True
        if others:
            self._debts[call.tenant] = len(others) * (time.monotonic() - began)

    # Ends

    def _fail(self, error: BaseException) -> None:
        """End all sequences and accept no others, because the error is not the fault of a single sequence."""
        status, why = self._status, f"the engine has failed: {type(error).__name__}: {error}"
        why = self._why_failed = " ".join(why.split()).rstrip(":")[:200]
        status.failure = error
        if status.refusal is not closed:
            status.refusal = lambda: EngineFailedError(f"{why}: load the model again")
        waiting = chain.from_iterable(backlog.waiting for backlog in self._backlogs.values())
        for answer in (*self._answers.values(), *waiting):
            answer.fail(error, why)
        shown = type(error), error, error.__traceback__, threading.current_thread()
        try:
            threading.excepthook(threading.ExceptHookArgs(shown))
        finally:
            self._end_all()

    def _end_all(self) -> None:
        """End all sequences without a further step, and let their readers know."""
        for backlog in set(self._backlogs.values()):
            backlog.end_waiting()
        self._backlogs.clear()
        if self._engine is not None:
            with suppress(Exception):
                self._engine.abandon()
        ended = list(self._answers)
        for sequence in ended:
            sequence.end()
        self._deliver(ended)

    def _finish(self) -> None:
        """Wake all waiting threads, and free the engine."""
        self._end_all()
        if self._engine is not None:
            self._engine.close()
        for call in (*self._calls, *self._begun_calls):
            call.work.close()
            call.reply.set(error=closed())
        self._status.is_over = True
        refuse_all(self._inbox)
