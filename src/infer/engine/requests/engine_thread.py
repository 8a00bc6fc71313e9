"""The thread that steps the engine. In a loop, it takes messages, and runs a step and a part of a call."""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import ExitStack, suppress
from operator import attrgetter
from queue import Empty, SimpleQueue
from typing import Any, final

import torch

from infer.compute.ops import Backend
from infer.engine.engine import Engine
from infer.engine.requests.answer import Answer, Backlog, EngineCall, Relay
from infer.engine.step.sequence import Sequence
from infer.errors import EngineFailedError, InferError, closed

_POLL_SECONDS = 0.1  # between checks while all answers pause, because one may time out or be cancelled by its event


@final
class EngineThread(threading.Thread):
    """The thread. A message to it is a call of one of its methods, which it makes between two steps.

    Once it is over, whoever sent a message calls `refuse_all`, so that the methods also run on other threads.
    """

    def __init__(self) -> None:
        """Begin without an engine."""
        super().__init__(name="infer-loop", daemon=True)
        # For other threads, too
        self.inbox = SimpleQueue[Callable[[], None]]()
        self.engine: Engine | None = None
        self.step_began: float | None = None  # when the current step began, by time.monotonic
        self.refusal: Callable[[], InferError] | None = None  # the error for every new sequence
        self.failure: BaseException | None = None  # the exception that ended the engine for good
        self.is_over = False  # the thread takes no more messages
        self.answers: dict[Sequence, Answer] = {}  # of the active sequences

        self._held = ExitStack()  # closed at the thread's end
        self._calls = deque[EngineCall[Any]]()  # of those that have begun the first one continues
        self._debts: dict[str, float] = {}  # seconds of steps that others are owed for a tenant's calls
        self._why_failed = ""
        self._is_closed = False

    def run(self) -> None:
        """Take messages and step until `close` is called."""
        with self._held:
            try:
                while not self._is_closed:
                    try:
                        if not self._calls:  # calls that a fault left behind
                            self._next_message()()
                        self._run_until_idle()
                    except BaseException as error:  # a fault of this module
                        self._fail(error)
            finally:
                self._finish()

    def _next_message(self) -> Callable[[], None]:
        """Wait for a message, and return it. Until one arrives, record steps of more sizes."""
        while self.engine is not None and self.inbox.empty() and self.engine.runner.record_next():
            continue
        return self.inbox.get()

    def _run_until_idle(self) -> None:
        """Run steps and calls until none are left."""
        while not self._is_closed and (self.answers or self._calls):
            if self.engine is not None:
                # Before the inbox is read: messages that arrive later interrupt the step.
                self.engine.interrupt.value = 0
            while not self.inbox.empty():
                self.inbox.get()()
            has_stepped = self._step()
            if not has_stepped:  # the others only wait
                self._debts.clear()
            if (call := self._next_call()) is not None:
                self._advance(call)
            elif self.answers and not (has_stepped or self._is_closed):
                try:  # all answers pause
                    self.inbox.get(timeout=_POLL_SECONDS)()
                except Empty:
                    self._cancel_unread()

    # Messages

    def own(self, engine: Engine | None, backend: Backend) -> None:
        """Step this engine from now on. On this thread, torch always computes with one thread."""
        if not self._is_closed:
            self.engine = engine
            self._held.enter_context(backend.threads())
            self._held.enter_context(torch.inference_mode())

    def submit(self, answer: Answer) -> None:
        """Compute an answer, in its lease's slot if it has one. If its backlog is full, it waits there."""
        sequence, backlog = answer.sequence, answer.backlog
        if self.failure is not None:
            answer.fail(self.failure, self._why_failed)
        if self.failure is not None or self._is_closed or sequence.has_ended:
            answer.end()
            return
        if backlog is not None and backlog.is_full:
            backlog.waiting.append(answer)
            return
        if backlog is not None:
            backlog.num_running += 1
        sequence.is_streamed = not answer.only_end
        self.answers[sequence] = answer
        self._open_engine.submit(sequence, answer.lease)

    def cancel(self, answer: Answer) -> None:
        if answer.sequence in self.answers:
            self._open_engine.cancel(answer.sequence)
        else:
            answer.end()

    def proceed(self, answer: Answer) -> None:
        """Continue an answer whose reader has room again, or waits only for its end."""
        if answer.sequence in self.answers:
            answer.sequence.is_streamed = not answer.only_end
            self._open_engine.proceed(answer.sequence)

    def call(self, call: EngineCall[Any]) -> None:
        if self.is_over:
            call.refuse(closed())
        else:
            self._calls.append(call)

    def close(self) -> None:
        """End the sequences, and the thread."""
        self._is_closed = True

    def refuse_all(self) -> None:
        """Answer the messages that arrived too late. For any thread, once this one is over."""
        with suppress(Empty):
            while True:
                self.inbox.get_nowait()()

    @property
    def has_room(self) -> bool:
        """True if a new sequence gets a slot: it must end a multi-step, and others must wait anyway. For any thread."""
        engine = self.engine
        return engine is not None and len(self.answers) < engine.max_running

    @property
    def _open_engine(self) -> Engine:
        assert self.engine is not None
        return self.engine

    # Steps

    def _step(self) -> bool:
        """Run a step if there is work."""
        engine = self.engine
        if engine is None or not self.answers or self._is_closed:
            return False
        self.step_began = began = time.monotonic()
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
            self.step_began, seconds = None, time.monotonic() - began
        if self._debts:
            debts = {tenant: owed - seconds for tenant, owed in self._debts.items()}
            self._debts = {tenant: owed for tenant, owed in debts.items() if owed > 0}
        self._deliver(sequences)
        return bool(sequences)

    def _deliver(self, sequences: Iterable[Sequence]) -> None:
        """Give the new pieces of these sequences to their answers, and call each event loop once."""
        relays = set[Relay]()
        for sequence in sequences:
            answer = self.answers[sequence]
            answer.put()
            if sequence.has_ended:
                del self.answers[sequence]
                if answer.backlog is not None:
                    self._submit_next(answer.backlog)
            if answer.relay is not None:
                relays.add(answer.relay)
            if not sequence.has_ended and answer.pause_if_full():
                self._open_engine.pause(sequence)
        for relay in relays:
            try:
                relay.call()
            except RuntimeError:  # its event loop is closed
                self._cancel_unread()

    def _submit_next(self, backlog: Backlog) -> None:
        """Submit the next answer of a backlog, of which one has ended. After the engine's failure, all of them end."""
        backlog.num_running -= 1
        while backlog.waiting and not backlog.is_full:
            self.submit(backlog.waiting.popleft())

    def _cancel_unread(self) -> None:
        """End the answers whose event loop is closed, because nothing can read them."""
        for sequence, answer in self.answers.items():
            if answer.relay is not None and answer.relay.event_loop.is_closed():
                self._open_engine.cancel(sequence)

    def _next_call(self) -> EngineCall[Any] | None:
        """Take out the call that continues, or return None. A call whose tenant owes steps to others waits.

        A call that does not give way also stops the calls behind it.
        """
        for call in sorted(self._calls, key=attrgetter("has_begun")):  # others begin first
            if call.tenant not in self._debts or call.is_cancelled:
                self._calls.remove(call)
                return call
            if not call.gives_way:
                break
        return None

    def _advance(self, call: EngineCall[Any]) -> None:
        """Run the next part of a call. Each other tenant with answers is owed steps for as long."""
        others, began = {each.tenant for each in self.answers} - {call.tenant}, time.monotonic()
        try:
            if call.is_cancelled:
                call.refuse(InferError("the call was cancelled"))
                return
            gives_way = bool(next(call.work))
        except StopIteration as ended:
            call.set(ended.value)
        except BaseException as error:
            call.set(error=error)
        else:
            call.gives_way = gives_way or not call.has_begun
            if call.gives_way:
                self._calls.append(call)
            else:
                self._calls.appendleft(call)
            call.has_begun = True
        if others:
            self._debts[call.tenant] = len(others) * (time.monotonic() - began)

    # Ends

    def _fail(self, error: BaseException) -> None:
        """End all sequences and accept no others, because the error is not the fault of a single sequence."""
        why = f"the engine has failed: {type(error).__name__}: {error}"
        why = self._why_failed = " ".join(why.split()).rstrip(":")[:200]
        self.failure = error
        if self.refusal is not closed:
            self.refusal = lambda: EngineFailedError(f"{why}: load the model again")
        for answer in self.answers.values():
            answer.fail(error, why)
        shown = type(error), error, error.__traceback__, threading.current_thread()
        try:
            threading.excepthook(threading.ExceptHookArgs(shown))
        finally:
            self._end_all()

    def _end_all(self) -> None:
        """End all sequences without a further step, and let their readers know."""
        if self.engine is not None:
            with suppress(Exception):
                self.engine.abandon()
        ended = list(self.answers)
        for sequence in ended:
            sequence.end()
        self._deliver(ended)

    def _finish(self) -> None:
        """Wake all waiting threads, and free the engine."""
        self._is_closed = True
        self._end_all()
        try:
            if self.engine is not None:
                self.engine.close()
        finally:
            self.engine = None
            for call in self._calls:
                call.refuse(closed())
            self.is_over = True
            self.refuse_all()
