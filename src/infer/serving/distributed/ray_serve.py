"""A Ray Serve application: a `RayFront` receives the clients' requests, and each `RayEngine` has the model.

Ray places, watches, counts and restarts engines. Requests pass through Ray as HTTP's bytes, as they are sent to any
replica. An engine hands them to the server in its own process, which listens on no address. Each process that sends
requests has its own `PrefixRouter`, which learns from them.
"""

import asyncio
import os
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, final

from ray import serve
from ray.exceptions import RayError
from ray.serve.config import AutoscalingConfig, RequestRouterConfig
from ray.serve.exceptions import BackPressureError, RayServeException
from ray.serve.handle import DeploymentHandle
from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica
from starlette.types import ASGIApp

import infer
from infer.compute.backends.before_load import step_limits
from infer.errors import InferError, InvalidRequestError
from infer.serving.distributed.exchange import Exchange, ReplicaFailedError
from infer.serving.distributed.front import Front
from infer.serving.distributed.router import NUM_PAGES, ReplicaRouter, RoutedPrompt
from infer.serving.protocols.api_errors import ApiError
from infer.serving.server.app import make_app
from infer.serving.server.process import HttpServer, load_model, warmed
from infer.serving.server.routes.status import is_alive
from infer.serving.server.server_state import ServerState
from infer.serving.server_settings import ServerSettings, read_keys
from infer.system.cores import take_cores

_READ_BYTES = 2**16
_HEALTH_SECONDS = 2.0
_ANSWER_SECONDS = 3.0  # for an engine's answer about its health
_ENDING_SECONDS = 2.0  # until a process has ended whose engine has failed
DRAIN_SECONDS = 600.0  # at most, for answers in progress: a long one takes minutes on a CPU
_ROUTER = "infer.serving.distributed.ray_serve.PrefixRouter"


@final
class PrefixRouter(RequestRouter):
    """A router for calls whose second argument is a `RoutedPrompt`."""

    def initialize_state(self, num_pages: int = NUM_PAGES) -> None:
        self._router = ReplicaRouter(num_pages)
        self._under_way: dict[str, tuple[str, RoutedPrompt]] = {}  # replica and prompt, by request

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Return the best replica, then all others. Ray uses the first one that is not full."""
        if pending_request is None:
            return [candidate_replicas]
        pending_request.routing_context.should_backoff = True
        replicas = {each.replica_id.unique_id: each for each in candidate_replicas}
        queued = dict.fromkeys(replicas, 0.0)
        for name, prompt in self._under_way.values():
            if name in queued:
                queued[name] += prompt.work
        best = replicas.pop(self._router.choose(_prompt_of(pending_request), queued))
        return [[best], list(replicas.values())]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: object) -> None:
        prompt, name = _prompt_of(pending_request), replica_id.unique_id
        self._under_way[pending_request.metadata.internal_request_id] = name, prompt
        self._router.sent(prompt, name)

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        self._under_way.pop(internal_request_id, None)

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        gone = self.curr_replicas.keys() - {each.replica_id for each in replicas}
        super().update_replicas(replicas)
        for replica_id in gone:
            self._router.forget(replica_id.unique_id)

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        super().on_replica_actor_died(replica_id)
        self._router.forget(replica_id.unique_id)


def _prompt_of(pending_request: PendingRequest) -> RoutedPrompt:
    prompt: RoutedPrompt = pending_request.args[1]
    return prompt


@final
@dataclass(frozen=True, kw_only=True)
class Deployed:
    """The settings of an application. `load` are the arguments of `LLM`, including `threads`.

    `fronts` is the number of fronts; with two, one may die. With `max_replicas`, engines are added while there are more
    active requests than slots, and removed later.
    """

    load: Mapping[str, Any]
    settings: ServerSettings
    replicas: int = 1
    fronts: int = 2
    max_replicas: int | None = None
    upscale_seconds: float = 10.0  # seconds of more requests before an engine is added
    downscale_seconds: float = 300.0  # seconds of fewer requests before an engine is removed

    def __post_init__(self) -> None:
        if self.max_replicas is not None and self.max_replicas < self.replicas:
            message = f"max_replicas must be at least replicas, {self.replicas}, got {self.max_replicas}"
            raise InvalidRequestError(message)


def app(arguments: Mapping[str, Any]) -> serve.Application:
    """Return the application that `serve deploy` makes of a YAML's `args`.

    They are the fields of `Deployed`, and `api_key_file`.
    """
    given = dict(arguments)
    load = {"model": "smollm2", "threads": 1, "reuse_prefixes": True, **given.pop("load", {})}
    keys = read_keys(Path(given.pop("api_key_file"))) if "api_key_file" in given else {}
    limits = step_limits(str(load.get("device", "cpu")))
    own = {"model": load["model"], "api_keys": keys, "drain_seconds": DRAIN_SECONDS, "max_slots": limits.logits}
    settings = ServerSettings(**{**own, **given.pop("settings", {})})
    return application(Deployed(load=load, settings=settings, **given))


def application(asked: Deployed) -> serve.Application:
    load, settings = asked.load, asked.settings
    engines = serve.deployment(
        RayEngine,
        name="Engine",
        ray_actor_options={
            "num_cpus": load["threads"],
            "num_gpus": int(str(load.get("device", "cpu")).startswith("cuda")),
        },
        max_ongoing_requests=2 * settings.slots,
        max_queued_requests=settings.max_queue,
        health_check_period_s=_HEALTH_SECONDS,
        graceful_shutdown_timeout_s=settings.drain_seconds,
        request_router_config=RequestRouterConfig(request_router_class=_ROUTER),
        **_scale(asked),
    )
    front = serve.deployment(
        serve.ingress()(RayFront),
        name="Front",
        num_replicas=asked.fronts,
        ray_actor_options={"num_cpus": 0},
        max_ongoing_requests=10**6,
        graceful_shutdown_timeout_s=settings.drain_seconds,
    )
    bound: serve.Application = front.bind(engines.bind(load, settings), settings)
    return bound


def _scale(asked: Deployed) -> dict[str, Any]:
    if asked.max_replicas is None:
        return {"num_replicas": asked.replicas}
    return {
        "autoscaling_config": AutoscalingConfig(
            min_replicas=asked.replicas,
            max_replicas=asked.max_replicas,
            target_ongoing_requests=asked.settings.slots,
            upscale_delay_s=asked.upscale_seconds,
            downscale_delay_s=asked.downscale_seconds,
            look_back_period_s=asked.upscale_seconds,
        )
    }


@final
class RayEngine:
    """A model, and the server that answers for it, in an actor."""

    async def __init__(  # type: ignore[misc]  # Ray awaits it
        self, load: Mapping[str, Any], settings: ServerSettings
    ) -> None:
        """Load the model and start the server. Raises the error of loading the model."""
        take_cores(load["threads"])
        self._state = ServerState(settings.of_child)
        await load_model(self._state, lambda on_progress: warmed(infer.LLM(**load, on_progress=on_progress)))
        if self._state.failure is not None:
            raise self._state.failure
        self._server = HttpServer(self._state)
        self._serving = asyncio.create_task(self._server.serve([]))
        await self._server.listening.wait()
        self._ending = asyncio.create_task(_end_when_failed(self._state))

    async def answer(self, request: bytes, prompt: RoutedPrompt) -> AsyncGenerator[bytes, None]:
        """Yield the bytes of the HTTP answer to the bytes of an HTTP request. The prompt is for the router."""
        reader, writer = await self._server.connect()
        try:
            writer.write(request)
            while found := await reader.read(_READ_BYTES):
                yield found
        finally:
            writer.close()

    async def get(self, target: bytes) -> tuple[str, int, bytes]:
        """Return name, status and body, for a front that asks all engines."""
        exchange = Exchange(*await self._server.connect())
        try:
            return serve.get_replica_context().replica_id.unique_id, *await exchange.get(target)
        finally:
            exchange.close()

    async def check_health(self) -> None:
        """Raise InferError if the engine has failed or hangs.

        Ray restarts an engine whose check raises three times in a row.
        """
        if not is_alive(self._state):
            raise InferError(f"the engine, in phase {self._state.phase!r}, has failed or hangs in a step")

    async def reconfigure(self, limits: Mapping[str, Any]) -> None:
        """Apply the YAML's `user_config`, which can change without a restart. Raises InvalidRequestError."""
        self._state.change_limits(limits)


async def _end_when_failed(state: ServerState) -> None:
    """End this process when its engine has failed, so that Ray starts another one."""
    await state.has_failed.wait()
    os._exit(1)


@final
class EngineConnection:
    """A connection to the engine that the router chooses, as a reader and a writer of `Exchange`."""

    def __init__(self, engines: DeploymentHandle, prompt: RoutedPrompt) -> None:
        self._engines, self._prompt = engines, prompt
        self._request = b""
        self._answer: Any = None

    def write(self, request: bytes) -> None:
        self._request += request

    async def drain(self) -> None:
        self._answer = self._engines.answer.remote(self._request, self._prompt)

    async def read(self, num_bytes: int) -> bytes:
        """Return the next bytes, or none at the end or if the engine died.

        Raises ApiError if too many requests wait.
        """
        try:
            found: bytes = await anext(self._answer, b"")
        except BackPressureError as error:
            headers = {"Retry-After": "1", "x-should-retry": "true"}
            message = "too many requests are waiting: retry later"
            raise ApiError(429, message, code="rate_limit_exceeded", headers=headers) from error
        except (RayError, RayServeException):
            return b""
        return found

    def close(self) -> None:
        if self._answer is not None:
            self._answer.cancel()


@final
class Engines:
    """All engines, as `Failover` needs them. They have no names that a client could ask for."""

    are_several = True

    def __init__(self, handle: DeploymentHandle) -> None:
        self._handle, self._asked = handle.options(stream=True), handle

    @asynccontextmanager
    async def exchange(self, prompt: RoutedPrompt) -> AsyncIterator[Exchange]:
        connection = EngineConnection(self._handle, prompt)
        exchange = Exchange(connection, connection)
        try:
            yield exchange
        except ReplicaFailedError:
            await asyncio.sleep(_ENDING_SECONDS)  # until no router chooses it
            raise
        finally:
            exchange.close()

    async def get(self, target: bytes) -> dict[str, tuple[int, bytes]]:
        """Ask all engines in parallel, and return status and body by name. Without a running engine, it is empty."""
        try:
            asked = await self._asked.broadcast("get", target)._fetch_replica_results_async()
        except (RayError, RayServeException):
            return {}
        waits = (asyncio.wait_for(each.get_async(), _ANSWER_SECONDS) for each in asked)
        answers = await asyncio.gather(*waits, return_exceptions=True)
        return {each[0]: each[1:] for each in answers if not isinstance(each, BaseException)}


class RayFront:
    """A front without a model: keys, origins, ids and counts of requests, and failover when an engine dies."""

    def __init__(self, engines: DeploymentHandle, settings: ServerSettings) -> None:
        own = replace(settings, allowed_hosts=("*",))  # Ray's proxy has the address
        self._front, self._state = Front(Engines(engines)), ServerState(own)
        self._state.phase = "ready"

    def __serve_build_asgi_app__(self) -> ASGIApp:
        return make_app(self._state, self._front.table)
