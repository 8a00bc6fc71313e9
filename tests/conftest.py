"""Conditions of every test: its extent, one thread per worker, shapes that are checked, and no skip that CI hides."""

import atexit
import gc
import os
import signal
import sys
from collections.abc import Generator, Iterator
from functools import _lru_cache_wrapper
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import extent
import shapes
from assets import CARRIER

if TYPE_CHECKING:  # files without models must not load torch
    from fake_cli import FakeModel
    from infer import LLM
    from path_cases import World
    from programs import Programs
    from served import Served

gc.disable()  # until all tests are known
_unfreeze, gc.unfreeze = gc.unfreeze, lambda: None  # after `infer.cli.main`, collections would search everything again
HARDWARE = "hardware: "
ALLOWED_IN_CI = (HARDWARE, CARRIER)  # beginnings of the reasons of skips

if not extent.IS_SHORT:  # these checks take time
    shapes.install()
sys.path += sorted(str(path) for path in Path(__file__).parent.rglob("[!_]*") if path.is_dir())  # for parts of others
os.environ["TRITON_INTERPRET"] = "1"  # before Triton is first imported: the kernels for GPUs run on the CPU
os.environ["INFER_PREFIX_DISK"] = "0"  # prompts of earlier tests must not be found on disk
os.environ["INFER_POISON"] = "1"  # new pages of a cache are filled with NaN, so that a read of unwritten values shows
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # as in a background job: processes of tests would inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_pycollect_makemodule(module_path: Path) -> None:
    """Set Hypothesis up before a file imports it: no deadline, which asserts a time, and the same examples in each run.

    INFER_TESTS=all draws new ones.
    """
    if "hypothesis" in module_path.read_text(encoding="utf-8"):
        from hypothesis import settings

        profile = settings.get_profile(settings.get_current_profile_name())
        settings.register_profile("tests", profile, deadline=None, derandomize=not extent.IS_WHOLE)
        settings.load_profile("tests")


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Do not import a file of which no test is run in this extent."""
    is_test = collection_path.suffix == ".py" and collection_path.name.startswith("test_")
    return True if is_test and extent.is_left_out(collection_path) else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Run files with slow tests first, because the other workers would wait for a long one at the end.

    `make test` leaves slow tests out. From now on garbage is collected, without what exists already.
    """
    short, rest = extent.split(items)
    wanted = set(short * (not extent.IS_REST) + extent.rest_of(rest) * (not extent.IS_SHORT))
    config.hook.pytest_deselected(items=[item for item in items if item not in wanted])
    items[:] = [item for item in items if item in wanted]
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: ("integration" not in item.path.parts, item.path not in slow))
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="module", autouse=True)
def _one_thread_per_worker() -> None:
    """Give each worker one thread, if the module has loaded torch. A test about threads sets its own number."""
    if "PYTEST_XDIST_WORKER" in os.environ and "torch" in sys.modules:
        import torch

        from infer.compute.backends.cpu.threads.pool import set_num_threads

        torch.set_num_threads(1)
        set_num_threads(1)


@pytest.fixture(scope="module", autouse=True)
def _free_caches_of_a_module(request: pytest.FixtureRequest) -> Generator[None, None, None]:
    """Empty the caches of a module, and free the memory that the C library keeps: workers grew to gigabytes."""
    yield
    from infer.system.available_memory import give_back_freed

    for value in vars(request.module).values():
        if isinstance(value, _lru_cache_wrapper) and not value.__module__.startswith("infer"):
            value.cache_clear()
    gc.collect()
    gc.freeze()
    give_back_freed()


@pytest.hookimpl(trylast=True)
def pytest_unconfigure() -> None:
    """Let libraries report objects that still exist at the end. A worker only ends: that takes it seven seconds."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        atexit._run_exitfuncs()
        os._exit(0)
    _unfreeze()


@pytest.fixture(autouse=True)
def _restore_signals() -> Generator[None, None, None]:
    """Restore signals: `infer.cli.main` ignores them at its end, and processes of later tests would inherit that."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, Any, Any]:
    """Fail tests and modules that CI may not skip."""
    report = yield
    if report.skipped and os.environ.get("CI") == "true" and isinstance(report.longrepr, tuple):
        reason = report.longrepr[2].removeprefix("Skipped: ")
        if not reason.startswith(ALLOWED_IN_CI):
            report.outcome = "failed"
            report.longrepr = f"{report.nodeid} was skipped, which CI does not allow: {reason}"
    return report


pytest_make_collect_report = pytest_runtest_makereport


# Fixtures of many tests. A module that needs another fixture of the same name defines its own.


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a Llama with random weights, whose tokens are bytes."""
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
    """Return a reranker that is recognised by its name."""
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


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> "World":
    """Return engines of a model of random weights, with the answers of the definition."""
    from path_cases import make_world

    return make_world("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def served(llm: "LLM") -> "Iterator[Served]":
    from served import serving

    with serving(llm, model="tiny") as served:
        yield served


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> "FakeModel":
    """Return the fake model that commands load in place of a real one."""
    from fake_cli import FakeModel
    from infer.cli import model_loading

    model = FakeModel()
    monkeypatch.setattr(model_loading, "load_model", lambda options: model)
    return model


@pytest.fixture(scope="session")
def programs() -> "Iterator[Programs]":
    """Return an object that runs programs in which torch and `infer` are already imported."""
    from programs import Programs

    made = Programs()
    yield made
    made.close()


@pytest.fixture
def quick_interpreter() -> Iterator[None]:
    from quick_interpreter import quick_interpreter  # it loads Triton, which may not be installed

    with quick_interpreter():
        yield
