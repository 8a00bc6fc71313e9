"""Servers of several models whose processes are fakes: the answers are those of servers at ports of this machine."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, ClassVar

import pytest

from infer.errors import InferError
from infer.serving.distributed.exchange import Exchange
from infer.serving.distributed.front import ShelfFront
from infer.serving.distributed.replica import Replica
from infer.serving.distributed.router import RoutedPrompt
from infer.serving.distributed.shelf import Shelf, ShelfWork
from infer.serving.distributed.shelved_model import ModelPlan, ModelSource
from infer.serving.server_settings import ServerSettings
from served import Served, serving


class OneReplica:
    """A child server at a port of this machine."""

    are_several = False

    def __init__(self, port: int) -> None:
        self._port = port

    @asynccontextmanager
    async def exchange(self, prompt: RoutedPrompt) -> AsyncIterator[Exchange]:
        exchange = Exchange(*await asyncio.open_connection("127.0.0.1", self._port))
        try:
            yield exchange
        finally:
            exchange.close()

    async def get(self, target: bytes) -> dict[str, tuple[int, bytes]]:
        return {}


class FakeReplica(Replica):
    """A fake process that is ready a moment after its start, unless its model is named "broken"."""

    running: ClassVar[list[str]] = []
    loaded: ClassVar[list[str]] = []  # including models that were unloaded later

    async def live(self, *, has_spare: bool) -> None:
        self.running.append(self.name)
        self.loaded.append(self.name)
        self.is_ready, self._ended = self.name != "broken", asyncio.Event()
        await asyncio.sleep(0.01)
        self._is_settled.set()
        if self.is_ready:
            await self._ended.wait()
            await asyncio.sleep(0.01)
        self.running.remove(self.name)
        if not self.is_ready:
            raise InferError("its files are cut off")

    def terminate(self) -> None:
        self._ended.set()

    def kill(self) -> None:
        pass


def use_replica(kind: type[FakeReplica], patch: pytest.MonkeyPatch) -> None:
    patch.setattr("infer.serving.distributed.shelved_model.Replica", kind)
    patch.setattr(FakeReplica, "running", [])
    patch.setattr(FakeReplica, "loaded", [])


@contextmanager
def serving_shelf(
    ports: Mapping[str, int], folders: Mapping[str, Path], plan: Callable[[ModelSource, int], ModelPlan], sockets: Path
) -> Iterator[tuple[Served, list[str]]]:
    """Serve models of these names and folders, each answered at its port. Yield also the names of those that hang."""
    hung = list[str]()

    class LocalReplica(FakeReplica):
        def exchange(self) -> Any:
            return OneReplica(ports[self.name]).exchange(RoutedPrompt(0))

        async def try_get(self, target: bytes) -> tuple[int, bytes] | None:
            return None if self.name in hung else (200, b"")

    sources: Sequence[ModelSource] = [ModelSource(name, str(folder)) for name, folder in folders.items()]
    with pytest.MonkeyPatch.context() as patch:
        use_replica(LocalReplica, patch)
        shelf = Shelf(
            sources, ServerSettings(memory=1 << 40), ShelfWork(plan, lambda source, _: [source.name]), sockets
        )
        try:
            with serving(None, table=ShelfFront(shelf).table) as front:
                front.state.phase = "ready"
                yield front, hung
        finally:
            shelf.kill()
