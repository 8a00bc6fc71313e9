"""`Loop`: the only thread that steps an engine. Other threads reach the engine only by messages.

Messages wait in an inbox until the current step has ended: a sequence to answer, one to cancel, or work that needs the
engine for a moment (`call`). After each step the thread gives the new pieces to their answers.
Signals reach only the main thread, so no signal can interrupt a step. Ctrl-C interrupts only the wait for it.

The thread has a reference to the loop only while an answer runs. When the loop is dropped, the thread ends.
"""

import asyncio
import atexit
import os
import threading
import weakref
from _thread import get_ident
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar, final

from infer.compute.ops import Backend
from infer.engine.engine import Engine
from infer.engine.requests.answer import Answer, Check, EngineCall, Relay, Waiters, Work, once
from infer.engine.requests.engine_thread import EngineThread
from infer.engine.requests.stream import OnPrefill, Stream
from infer.engine.step.request_options import CALLBACK
from infer.engine.step.sequence import Lease, Sequence
from infer.errors import ClosedError, InferError, closed
from infer.models.load import OnProgress
from infer.system.child_process import asking_tenant
from infer.system.cores import start_thread

NUM_PREPARING = 4
NUM_CONSTRAINING = 16  # threads, most of which only wait
_Result = TypeVar("_Result")


class _NotAwaitedError(Exception):
    """Raised in a thread that prepares a request after its caller has gone."""


@final
class Loop:
    """The loop, for any thread of this process. In a forked child every call raises ClosedError."""

    def __init__(self) -> None:
        """Start the thread. It has no engine before `own`."""
        self._process, self.is_open = os.getpid(), True  # until `close`
        self.thread = EngineThread()  # whose state any thread may read
        # The relay of each event loop, while it has answers.
        self._relays = weakref.WeakValueDictionary[asyncio.AbstractEventLoop, Relay]()
        self._preparing = ThreadPoolExecutor(NUM_PREPARING, "infer-prepare")
        self._constraining = ThreadPoolExecutor(NUM_CONSTRAINING, "infer-constrain")
        weakref.finalize(self, self.thread.inbox.put, self.thread.close).atexit = False
        start_thread(self.thread, blocks_signals=True)
        _living.add(self)
        _threads.add(self.thread)

    def own(self, engine: Engine | None, backend: Backend) -> None:
        """Give the thread its engine, or none for an encoder. From then on only the thread changes it."""
        self.thread.inbox.put(partial(self.thread.own, engine, backend))

    # State

    @property
    def is_current(self) -> bool:
        """True on the loop's own thread, where finalizers may run."""
        return get_ident() == self.thread.ident

    @property
    def can_be_awaited(self) -> bool:
        """False on the loop's own thread and in a forked child, where a wait would never end."""
        return not self.is_current and os.getpid() == self._process

    def check_process(self) -> None:
        """Raise ClosedError in a forked child."""
        if os.getpid() != self._process:
            raise ClosedError("the model belongs to the process that loaded it, not to its fork: load it again here")

    def check_open(self) -> None:
        """Raise ClosedError in a forked child, at the end of the program, and after `close`."""
        self.check_process()
        main = threading.main_thread()
        if get_ident() == main.ident and not main.is_alive():  # functions of `atexit` run then
            raise ClosedError("the program is ending: the model is closed")
        if not self.is_open:
            raise closed()

    # Answers

    def stream(
        self,
        sequence: Sequence,
        on_prefill: OnPrefill | None = None,
        lease: Lease | None = None,
        on_end: Callable[[], None] | None = None,
    ) -> Stream:
        """Return a stream of an answer, in a slot of its own or in the slot of a lease."""
        CALLBACK.check("on_prefill", on_prefill)
        return Stream(Answer(self, sequence, lease=lease, on_end=on_end), on_prefill)

    def submit(self, answer: Answer) -> None:
        """Compute an answer, in its lease's slot if it has one. Raises InferError if the loop accepts no more."""
        self._check_sender("an answer", self.thread.refusal)
        waits = answer.backlog is not None and answer.backlog.is_full
        self._send(partial(self.thread.submit, answer), is_urgent=self.thread.has_room and not waits)

    def proceed(self, answer: Answer) -> None:
        """Continue a paused answer. Never blocks and never raises."""
        self.thread.inbox.put(partial(self.thread.proceed, answer))

    def cancel(self, answer: Answer) -> None:
        """End an answer after the current step. A multi-step ends early. Never blocks and never raises.

        An answer that was not submitted ends, too, and can no longer be submitted.
        """
        answer.sequence.cancel()
        self._send(partial(self.thread.cancel, answer))

    # Calls

    def call(self, work: Work[_Result], relay: Relay | None = None) -> EngineCall[_Result]:
        """Run work on the loop's thread, up to its next `yield` between two steps.

        `relay` belongs to the event loop whose task waits for the result. Work begins when its message arrives. After
        its first `yield` it continues when all earlier work has ended or has let other work run. Raises ClosedError,
        and InferError on the loop's own thread, which cannot wait for itself.
        """
        self._check_sender("a call")
        call = EngineCall(work, relay, asking_tenant())
        self._send(partial(self.thread.call, call))
        return call

    def run(self, function: Callable[..., _Result], *arguments: Any) -> _Result:
        """Return `function(*arguments)`, called on the loop's thread between two steps.

        It has the context variables of the caller. Raises the errors of `call`.
        """
        return self.call(once(function, *arguments)).get()

    def load(self, load: Callable[[OnProgress], _Result], on_progress: OnProgress | None) -> _Result:
        """Return `load(show)`, called on the loop's thread. `show` calls `on_progress`.

        If an exception such as Ctrl-C interrupts the wait, the load ends at its next call of `show`.
        """
        is_left = threading.Event()

        def show(num_done: int, num_all: int) -> None:
            if is_left.is_set():
                raise InferError("the load was interrupted")
            if on_progress is not None:
                on_progress(num_done, num_all)

        try:
            return self.run(load, show)
        finally:
            is_left.set()

    # For the tasks of any number of event loops

    def relay(self) -> Relay:
        """Return the relay of the running event loop."""
        running = asyncio.get_running_loop()
        if (relay := self._relays.get(running)) is None:
            relay = self._relays[running] = Relay(running)
        return relay

    async def prepare(self, work: Callable[[Check], _Result], *, is_constrained: bool = False) -> _Result:
        """Return `work(check)`, called on a thread. If the task is cancelled, work ends at its next call of `check`.

        A request that `is_constrained` by a grammar or tools may wait for the process that tries grammars. It has its
        own threads, so that no other request waits for it. Raises ClosedError.
        """
        self.check_open()
        is_left = threading.Event()

        def check() -> None:
            if is_left.is_set():
                raise _NotAwaitedError

        threads = self._constraining if is_constrained else self._preparing
        try:
            future = asyncio.get_running_loop().run_in_executor(threads, work, check)
        except RuntimeError:
            if self.is_open:
                raise
            raise closed() from None  # by another thread
        try:
            return await future
        finally:
            is_left.set()

    async def call_as_task(self, work: Work[_Result]) -> _Result:
        """Return the result of `call`. If the task is cancelled, work ends at its next `yield`."""
        return await self.call(work, self.relay()).get_as_task()

    async def run_as_task(self, function: Callable[..., _Result], *arguments: Any) -> _Result:
        """Return `function(*arguments)`, called on the loop's thread between two steps."""
        return await self.call_as_task(once(function, *arguments))

    def answer(self, sequence: Sequence) -> Answer:
        """Return an answer that tasks of the running event loop read."""
        return Answer(self, sequence, Waiters(self.relay()))

    # Its end

    def close(self) -> None:
        """End all sequences as cancelled, free the engine, and end the thread. A second call does nothing.

        It waits a limited time for prefixes of prompts that are being stored.
        """
        if os.getpid() != self._process:
            return
        engine = self.thread.engine
        if self.is_open and not self.is_current and engine is not None and engine.prefixes is not None:
            engine.prefixes.flush()
        self.is_open, self.thread.refusal = False, closed
        self._send(self.thread.close)
        for threads in (self._preparing, self._constraining):
            threads.shutdown(wait=False)  # each ends after the request that it prepares
        if not self.is_current:
            self.thread.join()

    def _check_sender(self, awaited: str, refusal: Callable[[], InferError] | None = None) -> None:
        self.check_open()
        if self.is_current:
            raise InferError(
                f"the engine's own thread cannot wait for {awaited}: ask outside of callbacks and finalizers"
            )
        if refusal is not None:
            raise refusal()

    def _send(self, message: Callable[[], None], *, is_urgent: bool = True) -> None:
        """Let the thread call `message`. An urgent one ends a multi-step."""
        self.thread.inbox.put(message)
        if is_urgent and (engine := self.thread.engine) is not None:
            engine.interrupt.value = 1
        if self.thread.is_over:
            self.thread.refuse_all()


def _close_all() -> None:
    """Close all loops, so that no thread is stopped while it computes or frees a model."""
    for loop in list(_living):
        loop.close()
    for thread in list(_threads):
        thread.join()


_living = weakref.WeakSet[Loop]()
_threads = weakref.WeakSet[threading.Thread]()  # running threads
atexit.register(_close_all)
