"""Conditions of every test: shapes are checked at each call, a worker has one thread, and no skip is silent in CI."""

import gc
import os
import signal
import sys
from collections.abc import Generator, Iterator
from functools import _lru_cache_wrapper
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import shapes

if TYPE_CHECKING:  # a file of pure tests must not load torch
    from fake_cli import FakeModel
    from infer import LLM
    from path_cases import World
    from programs import Programs
    from served import Served

HARDWARE = "hardware: "  # a skip whose reason begins so is allowed in CI

shapes.install()
sys.path += [str(path) for path in Path(__file__).parent.iterdir() if path.is_dir()]  # for parts of other tests
os.environ["TRITON_INTERPRET"] = "1"  # before Triton is first imported: the kernels for GPUs run on the CPU
os.environ["INFER_PREFIX_DISK"] = "0"  # what earlier tests asked is not found on disk
os.environ["INFER_POISON"] = "1"  # pages of a cache that are handed out hold NaN: what was never written is never read
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # a run in the background; processes of tests would inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_pycollect_makemodule(module_path: Path) -> None:
    """Switch off Hypothesis' deadline, which asserts a time, before a file imports Hypothesis."""
    if "hypothesis" in module_path.read_text(encoding="utf-8"):
        from hypothesis import settings

        profile = settings.get_profile(settings.get_current_profile_name())
        settings.register_profile("no deadline", profile, deadline=None)
        settings.load_profile("no deadline")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files whose tests are slow come first: a long one that came last would keep the other workers waiting."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: ("integration" not in item.path.parts, item.path not in slow))


@pytest.fixture(scope="module", autouse=True)
def _one_thread_per_worker() -> None:
    """Give each worker one thread, if the module has loaded torch. A test about threads sets its own number."""
    if "PYTEST_XDIST_WORKER" in os.environ and "torch" in sys.modules:
        import torch

        from infer.backends.cpu.threads.pool import set_num_threads

        torch.set_num_threads(1)
        set_num_threads(1)


@pytest.fixture(scope="module", autouse=True)
def _what_a_module_held_is_given_back(request: pytest.FixtureRequest) -> Generator[None, None, None]:
    """Vocabularies and models in its caches, and what the C library keeps of them: workers grew to gigabytes."""
    yield
    from infer.system.available_memory import give_back_freed

    for value in vars(request.module).values():
        if isinstance(value, _lru_cache_wrapper) and not value.__module__.startswith("infer"):
            value.cache_clear()
    gc.collect()
    gc.freeze()  # what is left stays: no later collection looks at it again, which took half a second a module
    give_back_freed()


def pytest_sessionfinish() -> None:
    gc.unfreeze()  # libraries complain of what is still there at the end


@pytest.fixture(autouse=True)
def _signals_as_they_were() -> Generator[None, None, None]:
    """`infer.cli.main` ends with signals ignored, and processes that a later test starts would inherit that."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.skipped and os.environ.get("CI") == "true" and isinstance(report.longrepr, tuple):
        _fail_unless_hardware(report, report.longrepr[2])
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Modules are skipped by the same rule."""
    report = yield
    if report.skipped and os.environ.get("CI") == "true" and isinstance(report.longrepr, tuple):
        _fail_unless_hardware(report, report.longrepr[2])
    return report


def _fail_unless_hardware(report: pytest.TestReport | pytest.CollectReport, skipped: str) -> None:
    reason = skipped.removeprefix("Skipped: ")
    if not reason.startswith(HARDWARE):
        report.outcome = "failed"
        report.longrepr = f"{report.nodeid} was skipped, which CI does not allow: {reason}"


# What many tests begin with. A module that needs another one of the same name defines it.


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of random weights, with bytes as tokens."""
    from test_session import make_model

    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def llm(folder: Path) -> "LLM":
    from infer import LLM

    return LLM(folder)


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> Iterator["LLM"]:
    from embedding_model import make_embedding_model
    from infer import LLM

    folder = tmp_path_factory.mktemp("embedding")
    make_embedding_model(folder)
    with LLM(folder) as llm:
        yield llm


@pytest.fixture(scope="module")
def judge(tmp_path_factory: pytest.TempPathFactory) -> Iterator["LLM"]:
    """Return a reranker that is known by its name."""
    from infer import LLM
    from reranker_model import make_reranker_model

    folder = tmp_path_factory.mktemp("models") / "Qwen3-Reranker-tiny"
    make_reranker_model(folder)
    with LLM(folder) as llm:
        yield llm


@pytest.fixture(scope="module")
def labeller(tmp_path_factory: pytest.TempPathFactory) -> Iterator["LLM"]:
    """Return a classifier with three labels."""
    from classifier_model import join_pairs, make_classifier
    from infer import LLM

    folder = tmp_path_factory.mktemp("classifier")
    make_classifier(folder)
    join_pairs(folder)
    with LLM(folder) as llm:
        yield llm


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> "World":
    """Engines of a model of random weights, and what the definition answers."""
    from path_cases import make_world

    return make_world("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def served(llm: "LLM") -> "Iterator[Served]":
    from served import serving

    with serving(llm, model="tiny") as served:
        yield served


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> "FakeModel":
    """Return the model of a few lines that commands load in place of a real one."""
    from fake_cli import FakeModel
    from infer.cli import subcommands

    model = FakeModel()
    monkeypatch.setattr(subcommands, "load_model", lambda options: model)
    return model


@pytest.fixture(scope="session")
def programs() -> "Iterator[Programs]":
    """Return what runs programs that begin with torch and `infer` imported."""
    from programs import Programs

    made = Programs()
    yield made
    made.close()


@pytest.fixture
def quick_interpreter() -> Iterator[None]:
    from quick_interpreter import quick_interpreter  # loads Triton, which there may not be

    with quick_interpreter():
        yield
