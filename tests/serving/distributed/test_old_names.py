"""Names that were published before the packages moved into rooms work for one release, with a warning."""

import importlib
import sys
from types import ModuleType

import pytest

import infer


def test_the_old_place_of_the_batch_engine_warns() -> None:
    old = importlib.import_module("infer.distributed")
    with pytest.warns(DeprecationWarning, match=r"infer\.distributed\.BatchEngine is now infer\.BatchEngine"):
        assert old.BatchEngine is infer.BatchEngine
    with pytest.raises(AttributeError, match="no attribute 'Batch'"):
        _ = old.Batch


def test_the_import_path_of_older_configs_leads_to_the_application(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray imports `infer.distributed.ray_serve:app`. A stub stands for the module here, because it needs Ray."""
    stub, place = ModuleType("stub"), "infer.serving.distributed.ray_serve"
    stub.app = object()  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, place, stub)
    monkeypatch.delitem(sys.modules, "infer.distributed.ray_serve", raising=False)
    with pytest.warns(FutureWarning, match=rf"ray_serve:app is now {place}:app: change `import_path`"):
        assert importlib.import_module("infer.distributed.ray_serve").app is stub.app
    monkeypatch.delitem(sys.modules, "infer.distributed.ray_serve")
