"""Servers of several models whose processes are fakes: the answers are those of servers at ports of this machine."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, ClassVar

import pytest

from infer.errors import InferError
from infer.serving.distributed.exchange import Exchange
from infer.serving.distributed.replica import Replicas
from infer.serving.distributed.router import RoutedPrompt
from infer.serving.distributed.shelf import Shelf, ShelfWork
from infer.serving.distributed.shelf_front import ShelfFront
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


class FakeReplicas(Replicas):
    """A fake process that is ready a moment after its start, unless its model is named "broken"."""

    running: ClassVar[list[str]] = []
    loaded: ClassVar[list[str]] = []  # including models that were unloaded later

    def __init__(self, commands: Any, *others: Any, **settings: Any) -> None:
        super().__init__(commands, *others, **settings)
        (self.name,) = commands[0]

    async def start(self) -> None:
        self.running.append(self.name)
        self.loaded.append(self.name)
        await asyncio.sleep(0.01)
        if self.name == "broken":
            self.running.remove(self.name)
            self.failure = InferError("its files are cut off")
            self._settle()
        else:
            self._is_any_ready.set()

    async def stop(self) -> None:
        await asyncio.sleep(0.01)
        self.running.remove(self.name)

    def kill(self) -> None:
        pass


def use_replicas(kind: type[FakeReplicas], patch: pytest.MonkeyPatch) -> None:
    patch.setattr("infer.serving.distributed.shelved_model.Replicas", kind)
    patch.setattr(FakeReplicas, "running", [])
    patch.setattr(FakeReplicas, "loaded", [])


@contextmanager
def serving_shelf(
    ports: Mapping[str, int], folders: Mapping[str, Path], plan: Callable[[ModelSource, int], ModelPlan], sockets: Path
) -> Iterator[tuple[Served, list[str]]]:
    """Serve models of these names and folders, each answered at its port. Yield also the names of those that hang."""
    hung = list[str]()

    class LocalReplicas(FakeReplicas):
        def __init__(self, *arguments: Any, **settings: Any) -> None:
            super().__init__(*arguments, **settings)
            self.exchange = OneReplica(ports[self.name]).exchange  # type: ignore[assignment]

        async def get(self, target: bytes) -> dict[str, tuple[int, bytes]]:
            return {} if self.name in hung else {"0": (200, b"")}

    sources: Sequence[ModelSource] = [ModelSource(name, str(folder)) for name, folder in folders.items()]
    with pytest.MonkeyPatch.context() as patch:
        use_replicas(LocalReplicas, patch)
        shelf = Shelf(
            sources, ServerSettings(memory=1 << 40), ShelfWork(plan, lambda source, _: [source.name]), sockets
        )
        try:
            with serving(None, table=ShelfFront(shelf).table) as front:
                front.state.phase = "ready"
                yield front, hung
        finally:
            shelf.kill()
