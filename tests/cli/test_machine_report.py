"""`infer doctor --machine` names the machine's parts, and says which of its models fit."""

import json
from pathlib import Path

import pytest
import torch

from commands import run
from infer.cli.commands import models_command
from infer.cli.commands.models_command import machine_lines
from infer.compute.ops import backend_of
from infer.system import available_memory
from test_session import make_model

MODELS = [("small", 10**9, True, 31.4), ("large", 9 * 10**9, False, 2.2), ("in parts", None, None, None)]
FACTS = ("A processor", 4, 8, "avx2", 16 * 10**9, 4 * 10**9, 20 * 10**9, "in /cache", ["hub", "ray"])
NAMES = (
    "processor threads processors instruction_set memory_bytes available_bytes bytes_per_second kernels missing_extras"
)


def test_the_report_is_one_screen() -> None:
    keys = ("name", "memory_bytes", "fits", "tokens_per_second")
    models = [dict(zip(keys, model, strict=True)) for model in MODELS]
    assert list(machine_lines({**dict(zip(NAMES.split(), FACTS, strict=True)), "models": models})) == [
        "processor  A processor, 4 threads on 8 processors, avx2",
        "memory     4.0 GB of 16.0 GB available, read at 20.0 GB/s",
        "kernels    in /cache",
        "extras     missing: hub, ray (run pip install '.[hub,ray]' in the clone of infer)",
        "",
        "model      needs  fits     tokens per second",
        "small     1.0 GB  yes                     31",
        "large     9.0 GB  no                       2",
        "in parts          unknown",
    ]


def test_the_models_of_a_folder_are_forecast(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_model(tmp_path / "tiny")
    monkeypatch.setenv("INFER_MODELS", str(tmp_path))
    found = json.loads(run("doctor", "--machine", "--json").out)
    (tiny,) = (each for each in found["models"] if each["name"] == "tiny")
    assert tiny["fits"] is True
    assert tiny["memory_bytes"] > 0
    assert tiny["tokens_per_second"] > 0
    assert found["available_bytes"] <= found["memory_bytes"]
    assert found["bytes_per_second"] > 0
    assert found["kernels"] == backend_of(torch.device("cpu")).kernel_source()


def test_a_machine_without_known_memory_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(available_memory, "_meminfo", lambda root, field: None)
    monkeypatch.setattr(available_memory, "_memory", lambda root: iter(()))
    monkeypatch.setattr(models_command, "models_at_hand", lambda: iter(()))
    lines = run("doctor", "--machine").out.splitlines()
    assert lines[1].startswith("memory     unknown of unknown available")
    assert lines[-1] == "no model is on this machine: infer models says how to get one"


def test_there_is_no_page_of_a_machine(tmp_path: Path) -> None:
    refused = run("doctor", "--machine", "--html", tmp_path / "page.html", status=2)
    assert "--machine has no page" in refused.err
