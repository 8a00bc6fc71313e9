"""Several models in one server: the models in memory, and the requests that wait for them."""

import asyncio
import json
import os
import re
import signal
import socket
import sys
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from cases import cases
from commands import refused, run
from idle import in_event_loop
from infer import LLM
from infer.errors import InferError
from infer.serving.distributed.shelf import Shelf, ShelfWork
from infer.serving.distributed.shelved_model import ModelPlan, ModelSource, ShelvedModel, models_to_unload, wait_seconds
from infer.serving.protocols.api_errors import ApiError
from infer.serving.server_settings import ServerSettings
from served import SECONDS
from shapes import SOURCE
from shelves import FakeReplica, use_replica
from test_session import make_model

sys.path.append(str(SOURCE.parents[1] / "benchmarks"))
from front_kills import kill_fronts
from server_process import HOST, children, running

SIZES = {"a": 6, "b": 6, "c": 3, "huge": 20}


def resident(name: str, num_bytes: int, used_at: float, num_requests: int = 0) -> Any:
    return SimpleNamespace(name=name, num_bytes=num_bytes, used_at=used_at, num_requests=num_requests)


@cases(
    "missing residents expected",
    (3, [resident("old", 3, 1), resident("new", 3, 2)], ["old"]),
    (3, [resident("busy", 3, 1, 1), resident("idle", 3, 2)], ["idle"]),
    (4, [resident("busy", 3, 1, 1), resident("idle", 3, 2)], ["idle", "busy"]),
    (5, [resident("small", 1, 1), resident("large", 5, 2)], ["large"]),
    (5, [resident("small", 3, 1), resident("large", 4, 2)], ["small", "large"]),
    (4, [resident("new", 3, 2)], []),
    (0, [resident("old", 3, 1)], []),
)
def test_the_least_recently_used_idle_models_go_if_they_must(missing: int, residents: Any, expected: Any) -> None:
    assert [each.name for each in models_to_unload(missing, residents)] == expected


def plan(source: ModelSource, most_bytes: int) -> ModelPlan:
    if SIZES.get(source.name, 1) > most_bytes:
        raise InferError(f"{source.name} is too large: max_seq_len=9 fits")
    return ModelPlan(SIZES.get(source.name, 1))


def with_shelf(names: str = "a b c", pinned: str = "", loaded: str = "a c", **settings: Any) -> Any:
    """Decorate a test of a shelf of 10 bytes for the models of `SIZES`. Those that fit are loaded in their order."""
    sources = [ModelSource(name, name, name == pinned) for name in names.split()]
    work = ShelfWork(plan, lambda source, _: [source.name], lambda: [ModelSource("found", "found")])

    def decorate(test: Callable[[Shelf], Coroutine[Any, Any, None]]) -> Callable[..., None]:
        @in_event_loop
        async def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
            use_replica(FakeReplica, monkeypatch)
            for name in ("_START_SECONDS", "_ANSWER_SECONDS"):
                monkeypatch.setattr(f"infer.serving.distributed.shelved_model.{name}", 0.1)
            shelf = Shelf(sources, ServerSettings(memory=10, **settings), work, tmp_path)
            try:
                await shelf.start()
                await until(lambda: sorted(FakeReplica.running) == loaded.split())
                await test(shelf)
            finally:
                shelf.kill()

        return run

    return decorate


async def answer(shelf: Shelf, name: str, until: asyncio.Event | None = None, tenant: str = "") -> str:
    async with shelf.admitted(await shelf.named(name), tenant):
        assert name in FakeReplica.running
        assert sum(SIZES.get(each, 1) for each in FakeReplica.running) <= 10
        if until is not None:
            await until.wait()
    return name


async def until(is_so: Callable[[], bool]) -> None:
    while not is_so():
        await asyncio.sleep(0.001)


async def begun(shelf: Shelf, name: str, work: Coroutine[Any, Any, Any]) -> "asyncio.Task[Any]":
    """Begin work that asks for a model. Return when its request waits, is answered or has ended."""

    def count() -> int:
        return shelf.models[name].num_requests + len(shelf.models[name].waiting)

    before, task = count(), asyncio.create_task(work)
    await until(lambda: count() > before or task.done())
    return task


@with_shelf()
async def test_an_answer_is_not_ended_for_another_model_and_later_requests_wait_behind_it(shelf: Shelf) -> None:
    ended, answered = asyncio.Event(), list[str]()

    async def note(name: str, until: asyncio.Event | None = None) -> None:
        answered.append(await answer(shelf, name, until))

    running = [await begun(shelf, "a", note("a", ended))]
    running += [await begun(shelf, name, note(name)) for name in ("b", "a", "c")]
    await until(lambda: answered == ["c"])  # it can stay, and goes on
    assert shelf.models["a"].phase == "loaded", "it answers"
    ended.set()
    await asyncio.gather(*running)
    assert answered == ["c", "a", "b", "a"]


@with_shelf()
async def test_every_model_is_answered_however_many_clients_ask_for_another(shelf: Shelf) -> None:
    num_answers = dict.fromkeys("abc", 0)

    async def ask(name: str) -> None:
        for _ in range(20):
            async with shelf.admitted(await shelf.named(name)):
                assert sum(SIZES[each] for each in FakeReplica.running) <= 10
                await asyncio.sleep(0.001)
            num_answers[name] += 1

    await asyncio.gather(*(ask(name) for name in "aaabbc"))
    assert num_answers == {"a": 60, "b": 40, "c": 20}
    assert all(not model.num_requests for model in shelf.models.values())


@with_shelf(max_ttft=0.2)
async def test_a_request_that_waits_too_long_is_told_when_its_model_is_ready_and_then_finds_it(shelf: Shelf) -> None:
    ended = asyncio.Event()
    running = await begun(shelf, "a", answer(shelf, "a", ended))
    with pytest.raises(ApiError) as caught:
        await answer(shelf, "b")
    assert (caught.value.status, caught.value.code) == (503, "loading")
    assert float(caught.value.headers["Retry-After"]) >= 1
    ended.set()
    await running
    await until(lambda: "b" in FakeReplica.running)  # nobody waits for it, but somebody was told to come back
    with pytest.raises(ApiError):
        await answer(shelf, "a")
    await asyncio.sleep(0.3)
    assert (await answer(shelf, "b"), FakeReplica.loaded.count("b")) == ("b", 1)
    assert await answer(shelf, "a") == "a", "b has been used: nobody else is expected"


def test_a_model_is_kept_for_each_client_that_was_told_to_return_and_each_keeps_its_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [10.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])

    def at(seconds: float, call: Callable[[], Any]) -> Any:
        now[0] = seconds
        return call()

    with socket.socket() as own:
        model = ShelvedModel(ModelSource("a", "a"), own, lambda: None)
    at(10.0, lambda: model.promise(1.0, 5.0))
    at(11.0, lambda: model.promise(2.0, 100.0))
    assert at(12.0, model.wanted_since) == 1.0
    assert at(14.0, model.arrive) == 14.0, "a new client: nobody is due"
    assert at(15.0, model.arrive) == 1.0
    assert [at(16.0, model.wanted_since), at(17.0, model.arrive)] == [2.0, 17.0]
    assert at(11.0 + 60.0, model.arrive) == 2.0, "no client is told a longer time than a minute"
    assert model.wanted_since() == float("inf")
    at(80.0, lambda: model.promise(3.0, 5.0))
    assert at(95.0, model.wanted_since) == float("inf"), "it is late, and nobody waits for it any more"


def test_a_wait_counts_the_loads_before_it_and_the_answers_that_must_end() -> None:
    with ExitStack() as stack:
        models = dict[str, ShelvedModel]()
        for name, phase, load_seconds in (("a", "loaded", 2.0), ("b", "unloaded", 3.0), ("c", "unloaded", 4.0)):
            own = stack.enter_context(socket.socket())
            models[name] = model = ShelvedModel(ModelSource(name, name), own, lambda: None)
            model.phase, model._load_seconds, model.plan = phase, load_seconds, ModelPlan(SIZES[name])
        assert wait_seconds(models["c"], models.values()) == 4.0
        models["b"].promise(0.0, 20.0)
        assert wait_seconds(models["c"], models.values()) == 4.0 + 3.0
        models["a"].must_go, models["a"].num_requests = True, 1
        assert wait_seconds(models["c"], models.values()) == 4.0 + 3.0 + models["a"].busy_seconds


def test_a_load_that_is_late_is_told_to_take_longer() -> None:
    with socket.socket() as own:
        model = ShelvedModel(ModelSource("a", "a"), own, lambda: None)
        model.phase, model._load_seconds = "loading", 10.0
        for elapsed, expected in ((1.0, 9.0), (60.0, 30.0)):
            model._began_at = time.monotonic() - elapsed
            assert model.load_seconds == pytest.approx(expected, rel=0.1)


@with_shelf(max_queue=2)
async def test_the_requests_of_one_tenant_fill_no_line_but_their_own(shelf: Shelf) -> None:
    ended = asyncio.Event()
    running = [await begun(shelf, "a", answer(shelf, "a", ended))]
    running += [await begun(shelf, "b", answer(shelf, "b", tenant="greedy")) for _ in range(2)]
    with pytest.raises(ApiError, match="at most 2 requests of a key may wait for models") as caught:
        await answer(shelf, "b", tenant="greedy")
    assert (caught.value.status, "Retry-After" in caught.value.headers) == (429, True)
    running.append(await begun(shelf, "b", answer(shelf, "b", tenant="other")))
    ended.set()
    await asyncio.gather(*running)


@with_shelf()
async def test_a_client_that_leaves_while_it_waits_leaves_nothing_behind(shelf: Shelf) -> None:
    ended = asyncio.Event()
    running = await begun(shelf, "a", answer(shelf, "a", ended))
    waiting = await begun(shelf, "b", answer(shelf, "b"))
    waiting.cancel()
    await asyncio.wait([waiting])
    assert await answer(shelf, "a") == "a", "nobody waits for b any more"
    ended.set()
    await running
    assert not any(model.num_requests for model in shelf.models.values())


@with_shelf(names="broken huge a", loaded="a")
async def test_a_model_that_cannot_be_loaded_is_refused_and_the_others_answer(shelf: Shelf) -> None:
    for name, told in (("broken", "its files are cut off"), ("huge", "max_seq_len=9 fits")):
        with pytest.raises(ApiError, match=told) as caught:
            await answer(shelf, name)
        assert (caught.value.status, caught.value.code) == (503, "model_failed")
    assert await answer(shelf, "a") == "a"
    with pytest.raises(ApiError, match="'nope' is not served here: name one of 'broken', 'huge', 'a', 'found'"):
        await answer(shelf, "nope")


@with_shelf()
async def test_requests_for_unknown_names_share_one_look_for_models(shelf: Shelf) -> None:
    looks = list[None]()
    shelf._work = shelf._work._replace(find=lambda: looks.append(None) or [ModelSource("found", "found")])
    found = await asyncio.gather(*(shelf.named(name) for name in ("x", "y", "found", "z")), return_exceptions=True)
    assert [getattr(each, "code", None) for each in found] == ["model_not_found"] * 2 + [None, "model_not_found"]
    assert len(looks) == 1


@with_shelf(names="a b c", pinned="a", idle_unload=0.1)
async def test_a_pinned_model_stays_and_an_idle_one_is_unloaded_after_its_time(shelf: Shelf) -> None:
    await answer(shelf, "c")
    await until(lambda: FakeReplica.running == ["a"])
    with pytest.raises(ApiError, match="too large"):
        await answer(shelf, "b")
    with pytest.raises(ApiError, match="pinned"):
        await shelf.unload(await shelf.named("a"))


@with_shelf()
async def test_a_key_unloads_no_model_that_another_key_has_just_used(shelf: Shelf) -> None:
    model = await shelf.named("a")
    for tenant in ("bob", "alice"):
        async with shelf.admitted(model, tenant):
            model.idle_seconds, model.idle_tenant = 0.0, "alice"
    with pytest.raises(ApiError, match="another key has just used the model 'a'") as error:
        await shelf.unload(model, "alice")
    assert (error.value.status, error.value.code) == (409, "model_in_use")
    await asyncio.sleep(0.05)
    assert model.phase == "loaded"
    assert shelf.idle_seconds_of(model) > 50
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("infer.serving.distributed.shelved_model._KEPT_SECONDS", 0.0)
        await shelf.unload(model, "alice")
    assert model.phase == "unloaded"


@with_shelf()
async def test_a_model_is_unloaded_on_request_after_its_last_answer_and_loaded_again(shelf: Shelf) -> None:
    ended = asyncio.Event()
    running = await begun(shelf, "a", answer(shelf, "a", ended))
    unloading = asyncio.create_task(shelf.unload(await shelf.named("a")))
    await until(lambda: shelf.models["a"].is_leaving)
    later = await begun(shelf, "a", answer(shelf, "a"))
    await asyncio.sleep(0.02)
    assert [each.done() for each in (unloading, later)] == [False, False]
    ended.set()
    await asyncio.gather(running, unloading)
    assert await later == "a"
    await shelf.unload(await shelf.named("b"))  # it is not loaded


@with_shelf()
async def test_files_that_were_replaced_are_planned_again_before_their_model_is_loaded(shelf: Shelf) -> None:
    sizes = dict(SIZES)
    work = {"plan": lambda source, _: ModelPlan(sizes[source.name]), "version": lambda source: sizes[source.name]}
    shelf._work = shelf._work._replace(**work)
    a, b = shelf.models["a"], shelf.models["b"]
    await shelf.read_headers()
    sizes["a"] = 7
    await shelf.read_headers()
    assert a.num_bytes == 6, "it is in memory, with the plan for its old files"
    ended = asyncio.Event()
    running = [await begun(shelf, "a", answer(shelf, "a", ended))]
    running.append(await begun(shelf, "b", answer(shelf, "b")))
    sizes["b"] = 9  # while it waits for memory
    ended.set()
    await asyncio.gather(*running)
    assert (b.num_bytes, FakeReplica.running) == (9, ["b"]), "c is not left beside the larger b"
    assert (await answer(shelf, "a"), a.num_bytes) == ("a", 7)


# With processes


SERVE = [sys.executable, "-m", "infer", "serve", "--port", "PORT"]


def ask(url: str, model: str, prompt: str) -> httpx.Response:
    body = {"model": model, "prompt": prompt, "max_tokens": 12, "temperature": 0, "ignore_eos": True}
    return httpx.post(f"{url}/v1/completions", json=body, timeout=SECONDS)


@pytest.mark.slow
def test_models_that_take_turns_in_memory_answer_as_alone_also_after_one_was_killed(tmp_path: Path) -> None:
    folders = [make_model(tmp_path / name, num_layers=layers) for name, layers in (("one", 1), ("two", 2))]
    expected = {
        (folder.name, prompt): LLM(folder).generate(prompt, max_new_tokens=12, temperature=0, ignore_eos=True).text
        for folder in folders
        for prompt in ("hello", "another")
    }
    named = [word for folder in folders for word in ("-m", str(folder))]
    limits = ["--memory", "300MB", "--max-seq-len", "256", "--pool-pages", "8"]
    with running([*SERVE, *named, *limits], tmp_path / "log") as server, ThreadPoolExecutor(4) as pool:
        url = f"http://{HOST}:{server.port}"
        answers = [each.json() for each in pool.map(lambda asked: ask(url, *asked), expected)]
        assert [each["choices"][0]["text"] for each in answers] == list(expected.values())
        assert [each["model"] for each in answers] == [name for name, _ in expected]
        models = json.loads(server.get("/v1/models"))["data"]
        assert {model["status"]["value"] for model in models} <= {"loaded", "unloaded", "unloading"}
        assert sum(model["memory_bytes"] for model in models) > 300e6, "they fit one after the other only"
        assert server.resident_bytes() < 300e6 + 200e6, "the budget, and the process that has the clients"
        assert ask(url, "nope", "hello").status_code == 404
        assert 'model="' in server.get("/metrics")
        assert "<html" in server.get("/")
        assert ask(url, "two", "hello").status_code == 200
        os.kill(max(children(server.process.pid)), signal.SIGKILL)
        assert ask(url, "two", "hello").json()["choices"][0]["text"] == expected["two", "hello"]
        run("stop", "two", "--url", url)
        assert not children(server.process.pid)
        shown = run("ps", "--url", f"{url}/v1").out
        assert re.findall(r"(one|two) +unloaded +[\d,]+ MB +256 +generate", shown) == ["one", "two"]
        told = refused("stop", "nope", "--url", url)
        assert "the model 'nope' is not served here: name one of 'one', 'two'" in told
        assert json.loads(server.get("/health")) == {"status": "ok"}


@pytest.mark.slow
def test_when_the_front_is_killed_its_processes_end_and_the_next_start_answers_the_same(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "one", num_layers=1)
    expected = LLM(folder).generate("hello", max_new_tokens=12, temperature=0, ignore_eos=True).text

    def check(url: str) -> None:
        response = ask(url, "one", "hello")
        if response.status_code == 503:
            raise httpx.ConnectError("it is still loading")
        assert response.json()["choices"][0]["text"] == expected

    command = [*SERVE, "--models-dir", str(tmp_path), "--pin", "one"]
    found = kill_fronts(command, check, tmp_path, num_kills=2, longest=2.0)
    assert len(found["ended_after"]) == 2
    assert found["answers"] >= 1
