"""The page's list of models, in headless Chromium: a model is downloaded, with progress, and chosen."""

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from browser import Page, browsing
from idle import until
from infer import LLM
from infer.errors import InferError
from infer.serving.distributed.front import ShelfFront
from infer.serving.distributed.router import RoutedPrompt
from infer.serving.distributed.shelf import Shelf, ShelfWork
from infer.serving.distributed.shelved_model import ModelPlan, ModelSource
from infer.serving.server.routes import ollama
from infer.serving.server_settings import ServerSettings
from served import SECONDS, serving
from shelves import FakeReplica, OneReplica, use_replica
from test_session import make_model

pytestmark = pytest.mark.slow

NAME = "org/quants:Q4_K_M"


class Download(NamedTuple):
    """A download of 8 MB. The first 2 MB arrive immediately, and the others when the test allows it."""

    may_end: threading.Event
    has_stopped: threading.Event
    models: list[str]  # models that the server finds

    def fetch(self, name: str, report: Callable[[int, int], None]) -> Path:
        try:
            report(0, 8_000_000)
            report(2_000_000, 8_000_000)
            while not self.may_end.wait(0.02):
                report(2_000_000, 8_000_000)
        except InferError:
            self.has_stopped.set()
            raise
        self.models.append(name)
        return Path(name)


@pytest.fixture
def download(monkeypatch: pytest.MonkeyPatch) -> Download:
    found = Download(threading.Event(), threading.Event(), ["first"])
    monkeypatch.setattr(ollama, "fetch", found.fetch)
    monkeypatch.setattr(ollama, "is_at_hand", lambda name: False)
    monkeypatch.setattr(ollama, "is_fetched", lambda name: False if "/" in name else None)
    return found


@pytest.fixture
def page(download: Download, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Page]:
    """Return the page of a server with the models of the download. One process answers for all of them."""
    with LLM(make_model(tmp_path / "model")) as llm, serving(llm, model="first", is_child=True) as child:

        class LocalReplica(FakeReplica):
            def exchange(self) -> Any:
                return OneReplica(child.port).exchange(RoutedPrompt(0))

        use_replica(LocalReplica, monkeypatch)
        work = ShelfWork(
            lambda source, _: ModelPlan(7, takes=("generate",)),
            lambda source, _: [source.name],
            lambda: [ModelSource(name, name) for name in download.models],
        )
        shelf = Shelf([ModelSource("first", "first")], ServerSettings(memory=100), work, tmp_path)
        with ExitStack() as stack:
            stack.callback(shelf.kill)
            front = stack.enter_context(serving(None, table=ShelfFront(shelf).table, allow_pull=True))
            browser = stack.enter_context(browsing())
            front.state.phase = "ready"
            page = browser.page()
            page.open(front.url + "/")
            page.until("document.getElementById('model-choice').options.length === 2")
            yield page
            assert page.faults == []


def pull(page: Page, name: str) -> None:
    page.run(f"document.getElementById('pull-name').value = {name!r}")
    page.click("#pull-start")


def show(page: Page, name: str) -> None:
    """Store pictures at the widths of a desktop and of a phone, and check that the dialog fits both."""
    for width, height in ((1280, 800), (390, 844)):
        page.resize(width, height)
        assert page.run("document.documentElement.scrollWidth") <= width
        assert page.run("document.getElementById('pull-dialog').getBoundingClientRect().right") <= width
        if "INFER_ARTIFACTS" in os.environ:
            page.picture(Path(os.environ["INFER_ARTIFACTS"]) / f"{name}-{width}.png")


def test_a_model_is_downloaded_with_progress_can_be_stopped_and_is_chosen(page: Page, download: Download) -> None:
    said = "document.getElementById('pull-state').textContent"
    chosen = "e.selectedIndex = 1; e.dispatchEvent(new Event('change'));"
    page.run(f"(e => {{ {chosen} }})(document.getElementById('model-choice'))")
    page.until("document.getElementById('pull-dialog').open")
    pull(page, "nothing")
    page.until(f"{said}.includes('is not a name on the hub')")
    pull(page, NAME)
    page.until(f"{said}.startsWith('2.0 of 8.0 MB, ')")
    assert page.run("document.getElementById('pull-share').value") == 0.25
    show(page, "pull")
    page.click("#pull-stop")
    page.until(f"{said}.startsWith('Stopped.')")
    assert download.has_stopped.wait(SECONDS)
    download.may_end.set()
    pull(page, NAME)
    page.until(f"{said} === '{NAME} is downloaded, and is being loaded.'")
    until(lambda: NAME in FakeReplica.running)
