"""One model of a server of several: its process, its phase, its tasks, and the requests that it answers or lets wait.

    unloaded ──> loading ──> loaded ──> unloading ──> unloaded
                    │           │
                    └───────────┴──> failed ──> unloaded (at the next request)

A model is wanted since its first waiting request arrived. A request that has waited for its time is told when to
retry. Its model is still wanted until the client can be back, and the client keeps its place.

For the event loop only. Tasks have the names of `ModelPlan.takes`.
"""

import asyncio
import logging
import math
import socket
import time
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, final

from infer.errors import InferError
from infer.serving.distributed.replica import Replica
from infer.serving.protocols.api_errors import ApiError
from infer.serving.server.door import MAX_RETRY_SECONDS
from infer.serving.server.routes.served_models import StatusValue

log = logging.getLogger("infer.server")
SLACK_SECONDS = 10.0  # for which a model is kept after the time that a client was told
_START_SECONDS, _BYTES_PER_SECOND = 4.0, 5e8  # estimates for a model that was never loaded here
_END_SECONDS = 10.0  # for a process without requests to end after SIGTERM
_KEPT_SECONDS = 60.0  # after a key's use, in which no other key unloads the model
_ANSWER_SECONDS, _LEARNING = 5.0, 0.2  # of an answer before one has ended; weight of the newest answer in the mean
# The tasks of which a model must take one for an operation. Any model does if there are none.
TASKS_BY_OPERATION: Mapping[str, Sequence[str]] = {
    "": (),  # such a route uses no model
    "embeddings": ("embed",),
    "rerank": ("rerank", "embed"),  # a model for embeddings compares its vectors
    "classify": ("classify",),
}


class ModelSource(NamedTuple):
    """A model that can be loaded. `path` is the value of `--model`, and `name` is the name for clients."""

    name: str
    path: str
    is_pinned: bool = False  # True if it is loaded at the start and never unloaded


class ModelPlan(NamedTuple):
    """The plan for a model, from its headers.

    `num_bytes` is the most memory that it uses if its process gets these `options`. `takes` are its tasks.
    """

    num_bytes: int
    options: Sequence[str] = ()
    takes: Sequence[str] = ()
    context: int | None = None  # tokens


@final
@dataclass(eq=False)
class Ticket:
    """A request for a model, which its client wants since `arrived_at`. It waits until it `is_settled`."""

    tenant: str
    arrived_at: float
    is_settled: asyncio.Event = field(default_factory=asyncio.Event)
    admitted_at: float | None = None  # when it may continue
    failure: Exception | None = None  # the reason why it may not


class _Told(NamedTuple):
    """A client that was told when to retry: since when it wants the model, and the time when it is due."""

    since: float
    due_at: float


@final
class ShelvedModel:
    """A model, loaded or not. A model that `must_go` accepts no requests, and is unloaded after its last answer."""

    def __init__(self, source: ModelSource, own: socket.socket, on_failure: Callable[[], None]) -> None:
        self.source, self.own, self._on_failure = source, own, on_failure
        self.phase: StatusValue = "unloaded"
        self.plan: ModelPlan | None = None  # None before its headers were read
        self.version: Hashable = None  # version of the files for which the plan was made
        self.failure: Exception | None = None  # the reason why it could not be loaded
        self.replica: Replica | None = None
        self.must_go = self.is_leaving = False  # unloaded for another model; unloaded on request
        self.waiting = list[Ticket]()  # in the order of their arrival
        self.num_requests = 0  # active requests
        self.used_at = -math.inf  # time of the end of its last answer
        self.idle_seconds: float | None = None  # it is unloaded after this idle time; None: the server's setting
        self.idle_tenant = ""  # the tenant that has set `idle_seconds`
        self._life: asyncio.Task[None] | None = None  # of its process
        self._used_at_by_tenant: dict[str, float] = {}
        self._told = list[_Told]()
        self._began_at, self._load_seconds = 0.0, 0.0
        self._answer_seconds = _ANSWER_SECONDS

    @property
    def name(self) -> str:
        return self.source.name

    @property
    def num_bytes(self) -> int:
        return 0 if self.plan is None else self.plan.num_bytes

    @property
    def context(self) -> int | None:
        """Its context in tokens, or None before its headers were read."""
        return None if self.plan is None else self.plan.context

    def takes_one_of(self, tasks: Sequence[str]) -> bool:
        """Return True if the model can do one of the tasks, if there are none, or if its headers were not read."""
        return not tasks or self.plan is None or not set(tasks).isdisjoint(self.plan.takes)

    @property
    def is_in_memory(self) -> bool:
        return self.phase in ("loading", "loaded", "unloading")

    @property
    def is_idle(self) -> bool:
        return self.phase == "loaded" and not self.num_requests

    # Clients that want it

    def wanted_since(self) -> float:
        """Return the time since which a client wants the model that waits or is to return, or infinity if none does."""
        arrivals = [ticket.arrived_at for ticket in self.waiting]
        return min([*arrivals, *(told.since for told in self._expected())], default=math.inf)

    @property
    def is_wanted(self) -> bool:
        """True if a client wants the model, which is not in memory."""
        return self.phase == "unloaded" and self.wanted_since() < math.inf

    def promise(self, since: float, seconds: float) -> None:
        """Expect a client again after these seconds, but at most after the longest time that a client is told."""
        self._told.append(_Told(since, time.monotonic() + min(seconds, MAX_RETRY_SECONDS)))

    def arrive(self) -> float:
        """Return the time since which a client that arrives now wants the model.

        Clients cannot be distinguished, so the first client that is due has returned.
        """
        now = time.monotonic()
        due = min(self._expected(), key=lambda told: told.due_at, default=None)
        if due is None or due.due_at > now:
            return now
        self._told.remove(due)
        return due.since

    def _expected(self) -> list[_Told]:
        now = time.monotonic()
        self._told = [told for told in self._told if now < told.due_at + SLACK_SECONDS]
        return self._told

    def settle(self) -> None:
        """Let all waiting requests continue, or refuse them if the model has failed."""
        for ticket in self.waiting:
            ticket.failure = self.failure
            if self.failure is None:
                ticket.admitted_at = time.monotonic()
                self.num_requests += 1
            ticket.is_settled.set()
        self.waiting.clear()

    def leave(self, ticket: Ticket) -> None:
        """Drop a request that was answered, has left, or cannot be answered."""
        if ticket in self.waiting:
            self.waiting.remove(ticket)
        elif ticket.admitted_at is not None:
            self.note_use(ticket.tenant)
            self.num_requests -= 1
            self.used_at = time.monotonic()
            self._answer_seconds += _LEARNING * (self.used_at - ticket.admitted_at - self._answer_seconds)

    # Its use

    @property
    def load_seconds(self) -> float:
        """The expected seconds until the model is loaded, from the start of its load or from now.

        A load that takes longer than expected is expected to take half as long again.
        """
        expected = self._load_seconds or _START_SECONDS + self.num_bytes / _BYTES_PER_SECOND
        if self.phase != "loading":
            return expected
        elapsed = time.monotonic() - self._began_at
        return max(1.0, expected - elapsed, elapsed / 2)

    @property
    def busy_seconds(self) -> float:
        """The expected seconds until its active answers have ended."""
        return self._answer_seconds if self.num_requests else 0.0

    def note_use(self, tenant: str) -> None:
        self._used_at_by_tenant[tenant] = time.monotonic()

    def seconds_for_others(self, tenant: str) -> float:
        """Return for how many seconds the model is kept because another tenant has used it."""
        used = [used_at for name, used_at in self._used_at_by_tenant.items() if name != tenant]
        return max(0.0, max(used, default=-math.inf) + _KEPT_SECONDS - time.monotonic())

    # Its process

    async def load(self, command: Sequence[str], watchdog_seconds: float) -> None:
        """Start the process of a model in phase "loading", and return in phase "loaded" or "failed".

        If the process is ended meanwhile, the phase stays "loading".
        """
        self._began_at = time.monotonic()
        self.replica = replica = Replica(self.name, self.own, command, lambda _: None, watchdog_seconds)
        self._life = asyncio.create_task(self._live(replica))
        if await replica.until_ready():
            self.used_at = time.monotonic()
            self._load_seconds = self.used_at - self._began_at
            self.phase = "loaded"
            log.info("%s: loaded in %.1f s", self.name, self._load_seconds)

    async def _live(self, replica: Replica) -> None:
        try:
            await replica.live(has_spare=False)
        except (InferError, OSError) as error:
            self.fail(InferError(f"the model {self.name} cannot be loaded: {error}"))
            self._on_failure()

    async def unload(self) -> None:
        """End the process of a model in phase "unloading", and return in phase "unloaded"."""
        assert self.replica is not None
        assert self._life is not None
        self.replica.terminate()
        await asyncio.wait({self._life}, timeout=_END_SECONDS)
        self.replica.kill()
        await self._life
        self.replica, self.phase, self.is_leaving, self.idle_seconds = None, "unloaded", False, None
        log.info("%s: unloaded", self.name)

    def fail(self, failure: Exception) -> None:
        log.error("%s", failure)
        self.phase, self.failure, self.replica = "failed", failure, None
        self._told.clear()


def models_to_unload(missing_bytes: int, models: Iterable[ShelvedModel]) -> list[ShelvedModel]:
    """Return models that together have at least the missing bytes of memory, or none if there are too few.

    Idle models are chosen before busy ones, and among these the least recently used first. All chosen models are
    needed: the memory of the others would not be enough.
    """
    chosen, freed = list[ShelvedModel](), 0
    for each in sorted(models, key=lambda each: (each.num_requests > 0, each.used_at)):
        if freed < missing_bytes:
            chosen.append(each)
            freed += each.num_bytes
    if freed < missing_bytes:
        return []
    for each in reversed(list(chosen)):  # the most recently used ones stay if possible
        if freed - each.num_bytes >= missing_bytes:
            chosen.remove(each)
            freed -= each.num_bytes
    return chosen


def wait_seconds(model: ShelvedModel, models: Iterable[ShelvedModel]) -> float:
    """Return the expected seconds until the model is ready.

    Models are loaded one after the other, and a model makes room only after its answers have ended.
    """
    if model.phase == "loading":
        return model.load_seconds
    others = [each for each in models if each is not model]
    ahead = [each for each in others if each.is_wanted or each.phase == "loading"]
    answering = max((each.busy_seconds for each in others if each.must_go), default=0.0)
    return sum(each.load_seconds for each in (model, *ahead)) + answering


def refusal(model: ShelvedModel | None, tasks: Sequence[str], able: Sequence[str]) -> ApiError:
    """Return the error for a model that takes none of the tasks, or for None if no model does.

    `able` are the names of the models that take one.
    """
    takes = () if model is None or model.plan is None else model.plan.takes
    does = "no model here can" if model is None else f"the model {model.name!r:.80} can {' and '.join(takes)}, and not"
    fix = f"name {' or '.join(map(repr, able))}" if able else f"serve a model that can {' or '.join(tasks)}"
    return ApiError(400, f"{does} {tasks[0]}: {fix:.400}", param="model", code="unsupported_model")
