"""The models of one server, each in a process of its own, loaded on demand within one memory budget.

A request for a model that is not loaded waits until it is. If there is no room, the models that were not used for the
longest time are unloaded. No answer is ended for it: a model that must go takes no new requests, and is unloaded after
its last answer. The model that has been wanted for the longest time is loaded first, so no model keeps another one out.
"""

import asyncio
import math
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Hashable, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple, final

from infer.errors import InferError
from infer.serving.distributed.exchange import Exchange, GoneError
from infer.serving.distributed.replica import Replica, socket_in
from infer.serving.distributed.shelved_model import (
    SLACK_SECONDS,
    ModelPlan,
    ModelSource,
    ShelvedModel,
    Ticket,
    models_to_unload,
    refusal,
    wait_seconds,
)
from infer.serving.protocols.api_errors import NO_RETRY, ApiError
from infer.serving.server.door import retry_headers
from infer.serving.server.endpoint import known_name
from infer.serving.server.routes.served_models import StatusValue, cached_path
from infer.serving.server.server_state import Changes
from infer.serving.server_settings import ServerSettings

_LOOK_SECONDS = 1.0  # between two looks for models


class ShelfWork(NamedTuple):
    """The work that a shelf leaves to others.

    `plan` reads a model's headers, and returns a plan within the given bytes. `command` returns the command of its
    process, to which the descriptor of its socket is appended. `find` returns all models that are at hand now.
    `version` returns a value that changes with the model's files. All but `command` are called on other threads, and
    raise InferError.
    """

    plan: Callable[[ModelSource, int], ModelPlan]
    command: Callable[[ModelSource, ModelPlan], Sequence[str]]
    find: Callable[[], Sequence[ModelSource]] = lambda: ()
    version: Callable[[ModelSource], Hashable] = lambda source: None


@final
class Shelf:
    """For the event loop only. `folder` is for the models' sockets. The first of the sources is the default model.

    All models together have `settings.memory` bytes. After `max_ttft` seconds a waiting request is told when to retry,
    and at most `max_queue` requests of one tenant wait.
    """

    def __init__(self, sources: Sequence[ModelSource], settings: ServerSettings, work: ShelfWork, folder: Path) -> None:
        self.settings, self.budget = settings, settings.memory or 0
        self.models: dict[str, ShelvedModel] = {}
        self._work, self._folder = work, folder
        self._tasks = set[asyncio.Task[None]]()
        self._changes, self._looking = Changes(), asyncio.Lock()
        self._looked_at = -math.inf
        self._is_ending = False
        self._add(sources)

    # Its models

    async def named(self, name: str | None) -> ShelvedModel:
        """Return the model with this name, or the first one for None. Raises ApiError 404."""
        if name is None and self.models:
            return next(iter(self.models.values()))
        if (name := known_name(name, self.models)) not in self.models:
            await self.look_again()
        if name is not None and name not in self.models:
            path = await asyncio.to_thread(cached_path, name)  # a name of the hub may have several spellings
            name = next((each.name for each in self.models.values() if each.source.path == path), name)
        if name is not None and name in self.models:
            return self.models[name]
        served = f"name one of {', '.join(map(repr, self.models)) or 'those of GET /v1/models'}"
        if name is None:
            raise ApiError(400, f"model is missing: {served:.400}", param="model", code="missing_required_parameter")
        message = f"the model {name!r:.80} is not served here: {served:.400}"
        raise ApiError(404, message, "invalid_request_error", param="model", code="model_not_found")

    async def able(self, name: str | None, tasks: Sequence[str]) -> ShelvedModel:
        """Return the model with this name, or for None the first one that takes one of the tasks.

        Raises ApiError 404 for an unknown name, and 400 for a model of another kind. Any model does if there are no
        tasks, or if its headers cannot be read: it is refused for that.
        """
        named = await self.named(name) if name is not None or not (tasks and self.models) else None
        for model in list(self.models.values()) if named is None else [named]:
            with suppress(InferError):
                await self._know(model)
            if model.takes_one_of(tasks):
                return model
        await self.read_headers()
        able = [each.name for each in self.models.values() if each.plan is not None and each.takes_one_of(tasks)]
        raise refusal(named, tasks, able)

    async def look_again(self) -> None:
        """Add the models that are at hand since the last look. Requests share a look, at most one each second."""
        async with self._looking:
            if time.monotonic() - self._looked_at >= _LOOK_SECONDS:
                self._add(await asyncio.to_thread(self._work.find))
                self._looked_at = time.monotonic()

    async def read_headers(self) -> None:
        """Read the headers of all models whose headers were not read, or whose files were replaced."""
        async with self._looking:  # a second request finds what the first one has read
            for model in list(self.models.values()):
                if model.failure is None:
                    try:
                        await self._know(model)
                    except InferError as error:
                        model.fail(error)

    def _add(self, sources: Sequence[ModelSource]) -> None:
        for source in sources:
            if source.name not in self.models:
                own = socket_in(self._folder, len(self.models))
                self.models[source.name] = ShelvedModel(source, own, self._pump)

    @property
    def used_bytes(self) -> int:
        """The planned memory of all models that are loaded, or are being loaded or unloaded."""
        return sum(model.num_bytes for model in self.models.values() if model.is_in_memory)

    def idle_seconds_of(self, model: ShelvedModel) -> float:
        """Return the seconds after which the model is unloaded if it is idle. A pinned one never is."""
        seconds = self.settings.idle_unload if model.idle_seconds is None else model.idle_seconds
        if seconds is None or model.source.is_pinned:
            return math.inf
        return max(seconds, 0.0 if model.idle_seconds is None else model.seconds_for_others(model.idle_tenant))

    # The life of the server

    async def start(self) -> None:
        """Begin to load the pinned models, then as many of the others, in their order, as fit.

        Returns when one of them is ready. Raises InferError if none can be loaded, or if a pinned one can never be.
        """
        firsts = sorted(self.models.values(), key=lambda model: not model.source.is_pinned)
        for model in firsts:
            try:
                await self._know(model)
            except InferError as error:
                if model.source.is_pinned:
                    raise
                model.fail(error)
                continue
            if self.used_bytes + model.num_bytes <= self.budget:
                self._begin(model, "loading", self._load(model))

        def is_settled() -> bool:
            phases = {model.phase for model in firsts}
            return "loaded" in phases or "loading" not in phases

        await self._changes.until(is_settled)
        if firsts and all(model.failure is not None for model in firsts):
            raise InferError(str(firsts[0].failure))

    def terminate(self) -> None:
        """Send SIGTERM to all processes, which then drain. No model is loaded any more."""
        self._is_ending = True
        for model in self.models.values():
            if model.replica is not None:
                model.replica.terminate()

    def kill(self) -> None:
        for model in self.models.values():
            if model.replica is not None:
                model.replica.kill()
            model.own.close()

    # Requests

    @asynccontextmanager
    async def exchange(
        self, model: ShelvedModel, tenant: str, on_admitted: Callable[[], None] = lambda: None
    ) -> AsyncIterator[Exchange]:
        """Yield an exchange with the model's process once it is ready.

        Raises ApiError as `admitted` does, and GoneError if the process dies meanwhile.
        """
        was_ready, asked_at = model.phase == "loaded", time.monotonic()
        async with self.admitted(model, tenant) as replica:
            on_admitted()
            load_seconds = 0.0 if was_ready else time.monotonic() - asked_at
            if not await replica.until_ready():
                raise GoneError
            async with replica.exchange() as exchange:
                exchange.load_seconds = load_seconds
                yield exchange

    @asynccontextmanager
    async def admitted(self, model: ShelvedModel, tenant: str = "") -> AsyncIterator[Replica]:
        """Yield the model's process once it is loaded. The model is not unloaded before the context ends.

        Raises ApiError if the model cannot be loaded, or is not ready in time.
        """
        await self._check_line(model, tenant)
        ticket = Ticket(tenant, model.arrive())
        model.waiting.append(ticket)
        self._pump()
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(self.settings.max_ttft):
                    await ticket.is_settled.wait()
            if not ticket.is_settled.is_set():
                raise self._told_to_retry(model, ticket)
            if ticket.failure is not None:
                raise ApiError(503, str(ticket.failure), code="model_failed")
            assert model.replica is not None
            yield model.replica
        finally:
            model.leave(ticket)
            self._unload_if_idle(model)
            self._pump()

    async def unload(self, model: ShelvedModel, tenant: str = "") -> None:
        """Unload the model after its last answer, and return when its memory is free.

        Raises ApiError 409 for a pinned model, and for one that another tenant has just used.
        """
        if seconds := model.seconds_for_others(tenant):
            message = f"another key has just used the model {model.name!r:.80}: unload it in {seconds:.0f} s"
            raise ApiError(409, message, code="model_in_use", headers=NO_RETRY)
        if model.source.is_pinned:
            message = f"the model {model.name!r:.80} is pinned, so it cannot be unloaded"
            raise ApiError(409, message, code="model_pinned")
        if model.is_in_memory:
            model.is_leaving = True
            self._pump()
            await self._changes.until(lambda: not (model.is_leaving and model.is_in_memory))

    async def _check_line(self, model: ShelvedModel, tenant: str) -> None:
        """Raise ApiError if the model cannot be loaded, or if too many requests of the tenant wait for models."""
        model.note_use(tenant)
        try:
            await self._know(model)
        except InferError as error:
            raise ApiError(503, str(error), code="model_failed", headers=NO_RETRY) from error
        waiting = [ticket for each in self.models.values() for ticket in each.waiting]
        if sum(ticket.tenant == tenant for ticket in waiting) >= self.settings.max_queue:
            message = f"at most {self.settings.max_queue} requests of a key may wait for models: retry later"
            headers = retry_headers(wait_seconds(model, self.models.values()))
            raise ApiError(429, message, code="rate_limit_exceeded", headers=headers)

    def _told_to_retry(self, model: ShelvedModel, ticket: Ticket) -> ApiError:
        """Return the refusal of a request that has waited too long. Its model is loaded all the same."""
        seconds = wait_seconds(model, self.models.values())
        model.promise(ticket.arrived_at, seconds)
        asyncio.get_running_loop().call_later(seconds + SLACK_SECONDS, self._pump)
        state = "is loading" if model.phase == "loading" else "waits for memory that models with active answers use"
        message = f"the model {model.name!r:.80} {state}: retry later"
        return ApiError(503, message, code="loading", headers=retry_headers(seconds))

    async def _know(self, model: ShelvedModel) -> None:
        """Read the model's headers, unless it is in memory, or they were read and its files are the same.

        Raises InferError if it cannot be loaded or never fits.
        """
        if model.phase == "failed":  # its files may be complete now
            model.phase, model.failure, model.plan = "unloaded", None, None
        if not model.is_in_memory:
            plan, version = await self._plan_of(model)
            if not model.is_in_memory:
                model.plan, model.version = plan, version

    async def _plan_of(self, model: ShelvedModel) -> tuple[ModelPlan, Hashable]:
        """Return the plan for the model's files as they are now, and their version."""
        version = await asyncio.to_thread(self._work.version, model.source)
        if model.plan is not None and version == model.version:
            return model.plan, version
        pinned = [each for each in self.models.values() if each.source.is_pinned and each is not model]
        most_bytes = self.budget - sum(each.num_bytes for each in pinned)
        return await asyncio.to_thread(self._work.plan, model.source, most_bytes), version

    # Which requests continue, and which models are loaded or unloaded

    def _pump(self) -> None:
        """Admit the requests that may continue, and free memory for the model that was wanted first."""
        for model in self.models.values():
            model.must_go = model.is_leaving
        wanted = [each for each in self.models.values() if each.is_wanted]
        if wanted and not self._is_ending:
            self._make_room(min(wanted, key=ShelvedModel.wanted_since))
        for model in self.models.values():
            if model.failure is not None or (model.phase == "loaded" and not model.must_go):
                model.settle()
            if model.must_go and model.is_idle:
                self._begin(model, "unloading", model.unload())
        self._changes.announce()

    def _make_room(self, model: ShelvedModel) -> None:
        """Begin to load the model if its memory is free. Otherwise mark the models that must be unloaded for it.

        Models stay that are pinned, or that a client wants since an earlier time.
        """
        missing = self.used_bytes + model.num_bytes - self.budget
        if missing <= 0:
            self._begin(model, "loading", self._load(model))
            return
        missing -= sum(each.num_bytes for each in self.models.values() if each.phase == "unloading")
        since = model.wanted_since()
        loaded = [each for each in self.models.values() if each.phase == "loaded" and not each.source.is_pinned]
        for each in models_to_unload(missing, (one for one in loaded if one.wanted_since() > since)):
            each.must_go = True

    async def _load(self, model: ShelvedModel) -> None:
        try:
            model.plan, model.version = await self._plan_of(model)
        except InferError as error:
            model.fail(error)
            return
        if self.used_bytes > self.budget:  # the files were replaced by larger ones
            model.phase = "unloaded"
            return
        await model.load(self._work.command(model.source, model.plan), self.settings.watchdog_seconds)
        if model.phase == "loaded":
            model.settle()  # also the requests behind those for other models
            self._unload_if_idle(model)

    def _unload_if_idle(self, model: ShelvedModel) -> None:
        """Unload the model when it has been idle for its time."""
        seconds = self.idle_seconds_of(model)
        if math.isinf(seconds) or not model.is_idle:
            return

        def check(used_at: float) -> None:
            if model.is_idle and model.used_at == used_at and not self._is_ending:
                self._begin(model, "unloading", model.unload())

        asyncio.get_running_loop().call_later(seconds, check, model.used_at)

    def _begin(self, model: ShelvedModel, phase: StatusValue, work: Coroutine[Any, Any, None]) -> None:
        """Begin work that changes a model. Requests are looked at again when it has ended."""

        async def run() -> None:
            await work
            self._pump()

        model.phase = phase
        task = asyncio.create_task(run())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
