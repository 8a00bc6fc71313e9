"""`Service`: one thread that runs the steps of an engine, for readers that neither wait for it nor keep it waiting.

Its sequences run ahead of their readers, who are told of all that a step gave at once. While it has no sequences, the
thread sleeps and whoever waits for tokens runs the steps, as without it.
"""

import atexit
import os
import threading
import time
import weakref
from collections import defaultdict
from collections.abc import Callable
from collections.abc import Sequence as Items
from contextlib import suppress
from dataclasses import dataclass
from math import inf
from typing import NamedTuple, final

from infer.engine.engine import Engine, Output
from infer.engine.scheduler import MAX_SECONDS
from infer.engine.sequence import Sequence
from infer.errors import ClosedError, EngineFailedError, InferError
from infer.runner.closing import closed
from infer.system.locks import short_lock

OnOutputs = Callable[[Items[Output]], None]


class Heartbeat(NamedTuple):
    """The last sign of life, in seconds of `time.monotonic`. A thread that is not stepping has nothing to do."""

    seconds: float
    is_stepping: bool


@dataclass
class _Reader:
    on_outputs: OnOutputs
    num_told: int = 0  # pieces


@final
class Service:
    """For any thread. A forked child starts a thread of its own; there the sequences of its parent are cancelled."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._lock = short_lock()
        self._changed = threading.Condition(self._lock)
        self._readers: dict[Sequence, _Reader] = {}  # of the sequences that go on
        self._thread: threading.Thread | None = None
        self._refusal: Callable[[], InferError] | None = None  # of what is submitted
        self.failure: BaseException | None = None  # what the engine raised, which ended it for good
        self.heartbeat = Heartbeat(time.monotonic(), is_stepping=False)
        weakref.finalize(self, _notify, self._changed).atexit = False
        _living.add(self)

    @property
    def num_sequences(self) -> int:
        """How many go on."""
        return len(self._readers)

    def submit(self, sequence: Sequence, on_outputs: OnOutputs) -> None:
        """`on_outputs` is called by the service's thread, once after a step, with what it gave all the sequences that
        were submitted with it; the last time for a sequence that `has_ended`. It must return at once. Where it raises,
        its sequences are cancelled.

        Raises InferError where the service is drained or closed or has failed.
        """
        with self._changed:
            if self._refusal is not None:
                raise self._refusal()
            if self._thread is None:
                thread = threading.Thread(
                    target=_serve, args=(weakref.ref(self), self._changed), name="infer-service", daemon=True
                )
                thread.start()
                self._thread = thread
            sequence.runs_ahead = True
            self._readers[sequence] = _Reader(on_outputs)
            self._engine.submit(sequence)
            self._changed.notify_all()

    def cancel(self, sequence: Sequence) -> None:
        """Its slot is free when the step under way has ended, which several steps in one end early for."""
        sequence.cancel()
        self._engine.interrupt()

    def drain(self, timeout_seconds: float | None = None) -> bool:
        """Refuse what is submitted from now on, and wait until all sequences have ended; False if they have not."""
        with self._changed:
            self._refusal = self._refusal or _drained
            return self._changed.wait_for(lambda: not self._readers, timeout_seconds)

    def close(self) -> None:
        """Sequences that go on end as cancelled, and the thread ends."""
        with self._changed:
            self._refusal = closed
            for sequence in self._readers:
                sequence.cancel()
            thread = self._thread
            self._changed.notify_all()
        if thread not in (None, threading.current_thread()):
            thread.join()

    # On its thread

    def run(self) -> bool:
        """Steps until all sequences have ended. False where no others will come."""
        scheduler, followers = self._engine.scheduler, self._engine.followers
        try:
            scheduler.limit_prompts(MAX_SECONDS)  # so that who comes meanwhile is soon seen
            while self._readers:
                followers.lead()
                self.heartbeat = Heartbeat(time.monotonic(), is_stepping=True)
                with suppress(ClosedError):  # then all have ended
                    self._engine.step()
                self.heartbeat = Heartbeat(time.monotonic(), is_stepping=False)
                self._tell()
                followers.release()
        except BaseException as error:
            self._fail(error)
            raise
        finally:
            scheduler.limit_prompts(inf)
            followers.resign()
        return self._refusal is not closed

    def has_work(self) -> bool:
        return bool(self._readers) or self._refusal is closed

    def _tell(self) -> None:
        """Each reader once, of all that is new."""
        outputs = defaultdict[OnOutputs, list[Output]](list)
        with self._changed:
            for sequence, reader in list(self._readers.items()):
                has_ended, num_told = sequence.has_ended, reader.num_told  # first: then no more pieces come
                pieces = sequence.pieces[num_told:]
                if pieces or has_ended:
                    reader.num_told += len(pieces)
                    outputs[reader.on_outputs].append(Output(sequence, pieces))
                if has_ended:
                    del self._readers[sequence]
            if not self._readers:
                self._changed.notify_all()
        for on_outputs, found in outputs.items():
            try:
                on_outputs(found)
            except Exception:  # such as an event loop that was closed
                self._cancel_all_of(on_outputs)

    def _cancel_all_of(self, on_outputs: OnOutputs) -> None:
        with self._changed:
            for sequence, reader in self._readers.items():
                if reader.on_outputs == on_outputs:
                    sequence.cancel()

    def _fail(self, error: BaseException) -> None:
        """The engine raised what is no single sequence's fault: all end, and no others are taken."""
        why = " ".join(f"the engine has failed: {type(error).__name__}: {error}".split()).rstrip(":")
        with self._changed:
            self.failure = error
            self._refusal = lambda: EngineFailedError(f"{why:.200}: load the model again")
            failed = list(self._readers)
        for sequence in failed:
            sequence.cancel()
        with suppress(Exception):
            self._engine.cancel(failed[0])  # the engine lets go of all of them
        for sequence in failed:
            if sequence.finish_reason in (None, "abort"):
                sequence.fail("internal", f"{why:.200}")
            sequence.end()
        self._tell()

    def forget_parent(self) -> None:
        """In a forked child, which has no such thread."""
        for sequence in self._readers:
            sequence.cancel()
            sequence.abort()
        self._readers.clear()
        self._changed, self._thread = threading.Condition(self._lock), None
        self._engine.followers.forget_parent()


def _serve(reference: "weakref.ref[Service]", changed: threading.Condition) -> None:
    """While it waits, the thread holds nothing of the service, which may be dropped."""

    def is_awaited() -> bool:
        service = reference()
        return service is None or service.has_work()

    goes_on = True
    while goes_on:
        with changed:
            changed.wait_for(is_awaited)
        service = reference()
        goes_on = service is not None and service.run()
        del service


def _notify(changed: threading.Condition) -> None:
    with changed:
        changed.notify_all()


def _drained() -> InferError:
    return InferError("the service takes no more requests: it is shutting down")


def _close_all() -> None:
    for service in list(_living):
        service.close()


def _forget_parents() -> None:
    for service in list(_living):
        service.forget_parent()


_living = weakref.WeakSet[Service]()
atexit.register(_close_all)
os.register_at_fork(after_in_child=_forget_parents)
