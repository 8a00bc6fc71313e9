"""The state that all requests of a server share: its settings, its model, and its phase.

The routes that count tokens take `Turns`: one piece of work at a time per tenant, and a few in total. A text of 2 MB
takes one core for a second, and one client's texts must not occupy the threads that prepare all requests.
"""

import asyncio
import math
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import cached_property
from typing import Any, Literal, TypeVar, final

import infer
from infer.engine.step.step_costs import StepCosts
from infer.errors import ClosedError, InferError, InvalidRequestError
from infer.serving.protocols.api_errors import NO_RETRY, ApiError
from infer.serving.server.connection import Call
from infer.serving.server.door import Door, Load, RemainingWork, retry_headers
from infer.serving.server.metrics import Metrics
from infer.serving.server_settings import ServerSettings
from infer.system.child_process import asking_for

CHANGEABLE = ("slots", "step_ms", "max_queue", "max_ttft")  # settings that may change while requests are served
Phase = Literal["loading", "ready", "draining", "failed"]
_SNAPSHOT_SECONDS = 0.1  # for which a snapshot is used again
_Found = TypeVar("_Found")
_RETRY_SECONDS = 1.0  # after which a client with too many waiting texts may retry


@final
class Changes:
    """Lets tasks wait for conditions. The event loop announces each change of the values that a condition reads."""

    def __init__(self) -> None:
        self._next = asyncio.Event()

    def announce(self) -> None:
        self._next.set()
        self._next = asyncio.Event()

    async def until(self, is_true: Callable[[], object]) -> None:
        while not is_true():
            await self._next.wait()


@final
class ServerState:
    """State for the event loop only, with two exceptions.

    The loading thread counts `progress`; the watchdog reads `ticked_at` and `step_began`.
    """

    def __init__(self, settings: ServerSettings) -> None:
        self.settings, self.names = settings, (settings.model, *settings.aliases)  # names that clients see
        self.phase: Phase = "loading"
        self.progress = 0.0  # of loading, from 0 to 1
        self.failure: Exception | None = None  # the reason for phase "failed"
        self.started_at = time.time()
        self.has_failed = asyncio.Event()
        self.ticked_at: float | None = None  # last tick of the event loop; None while ticks are not expected
        self.calls = set[Call]()  # requests that have not ended
        self.door, self.turns = Door(settings), Turns()
        self.loaded: infer.AsyncLLM | None = None  # the model in any phase, after it was loaded
        self._taking: asyncio.Task[Any] | None = None  # the task that takes the newest snapshot
        self._taken_at, self._snapshot = -math.inf, None

    @cached_property
    def metrics(self) -> Metrics:
        """The counters. They are made at their first use, because `prometheus_client` takes some time to import."""
        return Metrics(self.settings.model if self.settings.metrics_names == "vllm" else None)

    def llm(self) -> "infer.AsyncLLM":
        """Return the model. Raises ApiError 503 unless requests are served."""
        self.check_ready()
        assert self.loaded is not None
        return self.loaded

    def host(self) -> Any:
        """Return the `Host` of the model. Raises ApiError 503 unless requests are served."""
        return self.llm().llm.host

    def check_ready(self) -> None:
        """Raise ApiError 503 unless requests are served."""
        if self.phase == "loading":
            percent = math.floor(100 * self.progress)
            raise ApiError(503, f"the model is loading ({percent} %)", code="loading", headers={"Retry-After": "1"})
        if self.phase == "draining":
            headers = {"Retry-After": "1", "Connection": "close"}
            raise ApiError(503, "the server is shutting down", code="shutting_down", headers=headers)
        if self.phase == "failed":
            raise ApiError(503, f"the server has failed: {self.failure}", code="failed", headers=NO_RETRY)

    def look(self) -> Load:
        """Return the load of the engine. Raises ApiError 503 unless requests are served."""
        engine, lengths = self.host().engine_if_any, self.door.lengths
        if engine is None:  # an encoder runs one call at a time
            return Load((), StepCosts(), self.settings.slots)
        cache = engine.runner.cache

        def fitting(num_tokens: int) -> int:
            needed = zip(cache.pool_pages, cache.pages_of(num_tokens), strict=True)
            most: int = min((pages // max(1, each) for pages, each in needed), default=engine.max_running)
            return most

        def work_of(each: Any) -> RemainingWork:
            answer = min(float(each.room), lengths.expected(each.tenant, len(each.pieces)))
            return RemainingWork(each.tenant, each.has_slot, max(0, each.num_pending - 1), each.num_computed, answer)

        return Load([work_of(each) for each in engine.sequences], engine.scheduler.costs, engine.max_running, fitting)

    async def snapshot(self, seconds: float | None = None) -> Any:
        """Return an `EngineSnapshot` that is at most a tenth of a second old, the same for all callers in that time.

        It waits for the current step to end. If that takes longer than `seconds`, return the last snapshot. Return None
        if there is none, or no engine.
        """
        now, taking, engine = time.monotonic(), self._taking, (host := self._host) and host.engine_if_any
        if host is None or engine is None:
            return None
        if taking is None or (taking.done() and now - self._taken_at >= _SNAPSHOT_SECONDS):
            taking = self._taking = asyncio.create_task(host.loop.run_as_task(engine.snapshot))
            self._taken_at = now
        await asyncio.wait({taking}, timeout=seconds)
        if taking.done():
            self._snapshot = taking.result()
        return self._snapshot

    def become_ready(self, llm: "infer.AsyncLLM") -> None:
        """Serve this model unless the server is shutting down."""
        self.loaded = llm
        llm.host.requests.warns = False  # answers contain their own warnings
        self._apply_limits()
        if self.phase == "loading":
            self.phase = "ready"

    def change_limits(self, limits: Mapping[str, Any]) -> None:
        """Change settings of `CHANGEABLE` while requests are served. Raises InvalidRequestError."""
        for name, value in limits.items():
            if name not in CHANGEABLE:
                raise InvalidRequestError(
                    f"{name} cannot be changed while requests are served: {', '.join(CHANGEABLE)} can"
                )
            kind, most = type(getattr(ServerSettings, name)), self.settings.max_slots if name == "slots" else math.inf
            if isinstance(value, bool) or not isinstance(value, int | kind) or not 0 < value <= most:
                raise InvalidRequestError(f"{name} must be a number above 0 and at most {most:g}, got {value!r:.60}")
        self.settings = self.door.settings = replace(self.settings, **limits)
        self._apply_limits()

    def _apply_limits(self) -> None:
        if self.loaded is not None:
            self.loaded.host.limit(self.settings.slots, self.settings.step_ms / 1000)

    def learn(self, call: Call) -> None:
        """Learn the lengths of answers and the length of a wait from a request that has ended."""
        for answer in call.answers:
            self.door.lengths.learn(call.key_name, len(answer.sequence.pieces))
        if call.entry is not None and call.answers and (arrivals := call.answers[0].sequence.timer.arrivals):
            waited = arrivals[0] - call.answers[0].sequence.submitted_at
            self.door.learn(call.entry.predicted, waited)

    def drain(self) -> None:
        """Accept no more requests. Running answers continue, and waiting ones are cancelled."""
        self.phase = "draining"
        for call in self.calls:
            call.cancel_waiting()

    def fail(self, failure: Exception) -> None:
        """Mark the server as failed. From now on every request is refused."""
        self.phase, self.failure = "failed", failure
        self.has_failed.set()

    @property
    def has_engine_failed(self) -> bool:
        return (host := self._host) is not None and host.loop.thread.failure is not None

    @property
    def has_answers(self) -> bool:
        """True while the model is answering a request."""
        return any(call.operation or call.is_forwarded for call in self.calls)

    def tick(self, lag_seconds: float) -> None:
        """Check the engine, and count how late the event loop was. Must be called regularly."""
        self.ticked_at = time.monotonic()
        self.metrics.lag.observe(max(0.0, lag_seconds))
        if self.loaded is None:
            return
        if (host := self._host) is None:
            if self.phase == "ready":
                self.fail(InferError("the model was closed"))
            return
        if host.engine_if_any is not None:
            taken = host.engine_if_any.scheduler.taken  # another thread continues to append steps
            self.metrics.count_steps(taken.popleft() for _ in range(len(taken)))
        if (failure := host.loop.thread.failure) is not None and self.phase != "failed":
            self.fail(InferError(f"the engine has failed: {type(failure).__name__}"))

    @property
    def step_began(self) -> float | None:
        """Time at which the current step began, or None if no step is running."""
        return None if (host := self._host) is None else host.loop.thread.step_began

    @property
    def _host(self) -> Any:
        """The `Host`, or None before the model is loaded.

        It is also None after the program that started the server has closed the model.
        """
        with suppress(ClosedError):
            return self.loaded and self.loaded.host
        return None


@final
class Turns:
    """For the event loop only. The tenant that has waited longest is next, unless it already has a turn."""

    def __init__(self, most_running: int = 2, most_waiting: int = 32) -> None:
        """Let at most `most_running` pieces of work run, and at most `most_waiting` per tenant wait."""
        self._most_waiting, self._num_waiting = most_waiting, Counter[str]()
        self._own = defaultdict[str, asyncio.Lock](asyncio.Lock)  # by tenant
        self._free = asyncio.Semaphore(most_running)

    async def run(self, tenant: str, work: Callable[[], _Found]) -> _Found:
        """Return the result of `work`, which runs on a thread.

        If the caller is cancelled, its turn ends when the thread has finished. Raises ApiError 429 if too much work of
        the tenant is waiting.
        """
        if self._num_waiting[tenant] >= self._most_waiting:
            message = f"the server is busy: {self._most_waiting} of your texts already wait, try again later"
            raise ApiError(429, message, code="rate_limit_exceeded", headers=retry_headers(_RETRY_SECONDS))

        def run() -> _Found:
            with asking_for(tenant):
                return work()

        with ExitStack() as turn:
            self._num_waiting[tenant] += 1
            try:
                await self._own[tenant].acquire()
                turn.callback(self._own[tenant].release)
                await self._free.acquire()
                turn.callback(self._free.release)
            finally:
                self._num_waiting[tenant] -= 1
            task, ends = asyncio.ensure_future(asyncio.to_thread(run)), turn.pop_all()
        task.add_done_callback(lambda done: done.cancelled() or done.exception())  # the caller may be gone
        task.add_done_callback(lambda done: ends.close())
        return await asyncio.shield(task)
