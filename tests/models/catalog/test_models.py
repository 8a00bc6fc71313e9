"""Claims about `infer models`: it lists each installed model under the name that loads it, without torch."""

import json
import os
import subprocess
from pathlib import Path

import gguf
import pytest
import torch
from safetensors.torch import save_file

from commands import run
from gguf_files import write_model
from infer.files import open_checkpoint, resolve
from infer.files.hub.find import INSTALLED_MODELS, InstalledModel
from infer.models.catalog.header_facts import read_facts
from infer.models.catalog.models_at_hand import ModelAtHand, models_at_hand
from test_hub import fill
from watched import python_command

CONFIG = {"model_type": "llama", "max_position_embeddings": 64}


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("INFER_MODELS", str(tmp_path / "own"))
    monkeypatch.setenv("INFER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for name in list(INSTALLED_MODELS):
        monkeypatch.delitem(INSTALLED_MODELS, name)
    (tmp_path / "own").mkdir()
    return tmp_path


def folder_of_safetensors(folder: Path) -> dict[str, bytes]:
    folder.mkdir(parents=True, exist_ok=True)
    save_file({"lm_head.weight": torch.zeros(4, 8, dtype=torch.bfloat16)}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "tokenizer.json").write_text("{}")
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_each_place_is_listed_under_names_that_load(places: Path) -> None:
    own = places / "own"
    write_model(own / "plain.gguf", extend=lambda writer: writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q4_K_M))
    write_model(own / "deep.gguf", split_tensors=4)
    (own / "sub").mkdir()
    for part in own.glob("deep-*"):
        part.rename(own / "sub" / part.name)
    files = folder_of_safetensors(own / "org" / "folder")
    fill(places / "hub", "org/repo", files)
    fill(places / "hub", "org/quants", {"m-Q4_0.gguf": (own / "plain.gguf").read_bytes(), "mmproj.gguf": b""}, "v2")
    found = {model.name: model for model in models_at_hand()}
    assert list(found) == [
        "org/quants@v2:m-Q4_0.gguf", "org/repo", "org/folder", "plain.gguf", "sub/deep-00001-of-00003.gguf",
    ]  # fmt: skip
    for name, model in found.items():
        assert model.problem is None
        assert open_checkpoint(name).path == Path(model.path)
    assert (found["plain.gguf"].weights, found["sub/deep-00001-of-00003.gguf"].weights) == ("Q4_K_M", "F32")
    assert (found["org/repo"].family, found["org/repo"].context, found["org/repo"].weights) == ("llama", 64, "BF16")
    assert found["org/repo"].num_bytes == len(files["model.safetensors"])
    assert found["sub/deep-00001-of-00003.gguf"].num_bytes == sum(p.stat().st_size for p in own.glob("sub/*"))


def test_a_model_that_cannot_be_loaded_is_listed_with_a_reason(places: Path) -> None:
    (places / "own" / "broken.gguf").write_bytes(b"GGUF" + bytes(40))
    write_model(places / "own" / "whole.gguf")
    head, broken, whole = run("models").out.splitlines()
    assert head.split() == ["name", "size", "weights", "context", "family", "from"]
    assert "folder, cannot be loaded: broken.gguf: version at byte 4: expected 2 or 3, got 0" in broken
    assert whole.split()[3:] == ["F32", "128", "llama", "folder"]


def test_without_models_the_list_says_how_to_get_one(places: Path) -> None:
    shown = run("models")
    assert ("pip install" in shown.err, shown.out) == (True, "")
    assert run("models", "--json").json() == []


def test_installed_packages_are_listed_and_not_put_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INFER_CACHE", str(tmp_path))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "none"))
    monkeypatch.delenv("INFER_MODELS", raising=False)
    found = {model.name: model for model in models_at_hand()}
    assert found["smollm2"] == ModelAtHand(
        "smollm2", "package", str(resolve("smollm2")), 98_362_432, "llama", "Q4_1", 8192
    )
    assert list(tmp_path.iterdir()) == []
    if "gemma3-270m" in found:
        gemma = found["gemma3-270m"]
        assert (gemma.weights, gemma.context, gemma.family) == ("Q4_K_M", 32_768, "gemma3_text")
        assert found["gemma3-270m"].num_bytes > 250_000_000


def test_a_package_in_parts_is_described_by_the_first(places: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = write_model(places / "whole.gguf", extend=lambda w: w.add_file_type(gguf.LlamaFileType.MOSTLY_Q8_0))
    content = whole.read_bytes()
    half = len(content) - 1000
    for index, part in enumerate((content[:half], content[half:])):
        package = places / "modules" / f"halved_{index}"
        package.mkdir(parents=True)
        (package / "model.part").write_bytes(part)
    (places / "modules" / "halved_0" / "SUMS").write_text(f"{'0' * 64}  whole.gguf\n")
    parts = (("halved_0", "model.part"), ("halved_1", "model.part"))
    monkeypatch.setitem(INSTALLED_MODELS, "halved", InstalledModel("", "whole.gguf", parts, ("halved_0", "SUMS")))
    monkeypatch.syspath_prepend(str(places / "modules"))
    found = {model.name: model for model in models_at_hand()}["halved"]
    assert (found.weights, found.context, found.family) == ("Q8_0", 128, "llama")
    assert (found.num_bytes, found.problem) == (len(content), None)
    assert not (places / "cache").exists()


def test_listing_loads_no_torch() -> None:
    code = "import sys; from infer.cli import main; main(['models', '--json']); print('torch' in sys.modules)"
    done = subprocess.run(python_command(code), capture_output=True, text=True, check=True)
    models, has_torch = done.stdout.splitlines()
    assert has_torch == "False"
    assert "smollm2" in {model["name"] for model in json.loads(models)}


def test_the_facts_are_those_of_the_file_that_has_the_name_now(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    for seconds, name in enumerate(("Q8_0", "Q4_0")):  # their headers have the same size
        file_type = gguf.LlamaFileType[f"MOSTLY_{name}"]
        write_model(path, extend=lambda writer, of=file_type: writer.add_file_type(of))
        os.utime(path, (seconds, seconds))
        facts = read_facts(str(path))
        assert (facts.weights, facts.modified_at) == (name, seconds)
        assert read_facts(str(path)) is facts
