"""One model of a server of several: its process, its phase, its tasks, and the requests that it answers or lets wait.

For the event loop only. Tasks have the names of `ModelPlan.takes`.
"""

import logging
import math
import socket
import time
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from typing import Literal, NamedTuple, final

from infer.errors import InferError
from infer.serving.distributed.replica import Replicas
from infer.serving.distributed.unloading import Resident, Wishes
from infer.serving.protocols.errors import ApiError
from infer.serving.server.app import ROUTES

log = logging.getLogger("infer.server")
_START_SECONDS, _BYTES_PER_SECOND = 4.0, 5e8  # estimates for a model that was never loaded here
_KEPT_SECONDS = 60.0  # after a key's use, in which no other key unloads the model
_ANSWER_SECONDS, _LEARNING = 5.0, 0.2  # of an answer before one has ended; weight of the newest answer in the mean
ModelPhase = Literal["unloaded", "loading", "ready", "unloading", "failed"]
_TASKS_BY_OPERATION: Mapping[str, Sequence[str]] = {
    "embeddings": ("embed",),
    "rerank": ("rerank", "embed"),  # a model for embeddings compares its vectors
    "classify": ("classify",),
}
_TASKS_BY_PATH = {
    route.path: _TASKS_BY_OPERATION.get(route.operation, ("generate",)) for route in ROUTES if route.operation
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
class ShelvedModel:
    """A model, loaded or not. A model that `must_go` accepts no requests, and is unloaded after its last answer."""

    def __init__(self, source: ModelSource, own: socket.socket, on_failure: Callable[[], None]) -> None:
        self.source, self.own, self._on_failure = source, own, on_failure
        self.phase: ModelPhase = "unloaded"
        self.plan: ModelPlan | None = None  # None before its headers were read
        self.version: Hashable = None  # version of the files for which the plan was made
        self.failure: Exception | None = None  # the reason why it could not be loaded
        self.replicas: Replicas | None = None
        self.must_go = self.is_leaving = False  # unloaded for another model; unloaded on request
        self.num_requests = 0  # active requests
        self.used_at = -math.inf  # time of the end of its last answer
        self.idle_seconds: float | None = None  # it is unloaded after this idle time; None: the server's setting
        self.idle_tenant = ""  # the tenant that has set `idle_seconds`
        self._used_at_by_tenant: dict[str, float] = {}
        self.wishes = Wishes()
        self._began_at, self._load_seconds = 0.0, 0.0
        self._answer_seconds = _ANSWER_SECONDS

    @property
    def name(self) -> str:
        return self.source.name

    @property
    def num_bytes(self) -> int:
        return 0 if self.plan is None else self.plan.num_bytes

    def takes_one_of(self, tasks: Sequence[str]) -> bool:
        """Return True if the model can do one of the tasks, if there are none, or if its headers were not read."""
        return not tasks or self.plan is None or not set(tasks).isdisjoint(self.plan.takes)

    @property
    def is_in_memory(self) -> bool:
        return self.phase in ("loading", "ready", "unloading")

    @property
    def is_idle(self) -> bool:
        return self.phase == "ready" and not self.num_requests

    @property
    def resident(self) -> Resident:
        is_kept = self.source.is_pinned or self.phase == "loading" or self.is_wanted
        return Resident(self.name, self.num_bytes, self.used_at, is_busy=self.num_requests > 0, is_kept=is_kept)

    @property
    def is_wanted(self) -> bool:
        """True while a client is expected that was told when to retry."""
        return self.wishes.seconds_left(time.monotonic()) > 0

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

    def end_answer(self, began_at: float) -> None:
        self.num_requests -= 1
        self.used_at = time.monotonic()
        self._answer_seconds += _LEARNING * (self.used_at - began_at - self._answer_seconds)

    async def load(self, command: Sequence[str], watchdog_seconds: float) -> None:
        """Start the process of a model in phase "loading", and return in phase "ready" or "failed".

        If the process is ended meanwhile, the phase stays "loading".
        """
        self._began_at = time.monotonic()
        replicas = Replicas([command], [self.own], watchdog_seconds, self._follow, has_spares=False)
        self.replicas = replicas
        await replicas.start()
        if replicas.failure is None and replicas.is_ready:
            self.used_at = time.monotonic()
            self._load_seconds = self.used_at - self._began_at
            self.phase = "ready"
            log.info("%s: loaded in %.1f s", self.name, self._load_seconds)

    async def unload(self) -> None:
        """End the process of a model in phase "unloading", and return in phase "unloaded"."""
        assert self.replicas is not None
        await self.replicas.stop()
        self.replicas, self.phase, self.is_leaving, self.idle_seconds = None, "unloaded", False, None
        log.info("%s: unloaded", self.name)

    def fail(self, failure: Exception) -> None:
        log.error("%s", failure)
        self.phase, self.failure, self.replicas = "failed", failure, None
        self.wishes.clear()

    def _follow(self, replicas: Replicas) -> None:
        if replicas.failure is not None:
            self.fail(InferError(f"the model {self.name} cannot be loaded: {replicas.failure}"))
            self._on_failure()


def wait_seconds(model: ShelvedModel, models: Collection[ShelvedModel], waiting: Collection[str], budget: int) -> float:
    """Return the expected seconds until the model is ready.

    `waiting` are the names of the models for which requests wait. Models are loaded one after the other, and a model
    makes room only after its answers have ended. A model that is kept for clients makes no room before they can be
    back.
    """
    if model.phase == "loading":
        return model.load_seconds
    others = [each for each in models if each is not model]
    ahead = [each for each in others if not each.is_in_memory and (each.is_wanted or each.name in waiting)]
    loads = [model, *ahead, *(each for each in others if each.phase == "loading")]
    answering = max((each.busy_seconds for each in others if each.must_go), default=0.0)
    return sum(each.load_seconds for each in loads) + max(answering, _kept_seconds(model, others, budget))


def _kept_seconds(model: ShelvedModel, others: Sequence[ShelvedModel], budget: int) -> float:
    """Return for how long models that are kept for clients prevent the load of this one."""
    kept = [each for each in others if each.is_in_memory and (each.is_wanted or each.source.is_pinned)]
    if model.num_bytes + sum(each.num_bytes for each in kept) <= budget:
        return 0.0
    now = time.monotonic()
    return max((each.wishes.seconds_left(now) for each in kept), default=0.0)


def tasks_of_route(path: str) -> Sequence[str]:
    """Return the tasks of which a model must take one to answer on this route. Any model answers if there are none."""
    return _TASKS_BY_PATH.get(path, ())


def refusal(model: ShelvedModel | None, tasks: Sequence[str], able: Sequence[str]) -> ApiError:
    """Return the error for a model that takes none of the tasks, or for None if no model does.

    `able` are the names of the models that take one.
    """
    takes = () if model is None or model.plan is None else model.plan.takes
    does = "no model here can" if model is None else f"the model {model.name!r:.80} can {' and '.join(takes)}, and not"
    fix = f"name {' or '.join(map(repr, able))}" if able else f"serve a model that can {' or '.join(tasks)}"
    return ApiError(400, f"{does} {tasks[0]}: {fix:.400}", param="model", code="unsupported_model")
