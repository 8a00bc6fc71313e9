"""Claims about names on the hub: their meaning, the files downloaded for them, and use of the cache alone."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fake_hub import COMMIT, FakeHub, serving
from infer.errors import InvalidRequestError, ModelError
from infer.files import open_checkpoint, resolve
from infer.files.hub.hub import (
    HubName,
    choose,
    find_cached,
    gguf_models,
    hub_cache_folder,
    parse_hub_name,
    remove_cached,
)
from refusals import check_refused
from watched import python_command

SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
INDEX = json.dumps({"weight_map": {"a": SHARDS[0], "b": SHARDS[1]}}).encode()
SMALL_NAMES = ("config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json")
SMALL = {name: name.encode() for name in SMALL_NAMES}  # the hub's library downloads equal contents once
QUANTISED = ("m-Q4_0.gguf", "m-Q4_K_M.gguf", "m-Q4_K_S.gguf", "m-IQ4_NL.gguf", "mmproj-m-Q4_0.gguf")
QUANTISED += ("m-UD-Q4_K_XL.gguf",)
BF16 = "org/quants:BF16"
SPLIT = tuple(f"BF16/m-BF16-0000{number}-of-00003.gguf" for number in (1, 2, 3))
REPOSITORIES: dict[str, dict[str, bytes]] = {
    "org/plain": SMALL | {name: name.encode() for name in ("model.safetensors", "a.bin", "m.gguf", "README.md")},
    "org/sharded": {
        **SMALL, "model.safetensors.index.json": INDEX, SHARDS[0]: b"1", SHARDS[1]: b"2",
        "consolidated.safetensors": b"3", "chat_template.jinja": b"x", "additional_chat_templates/rag.jinja": b"y",
        "onnx/model.onnx": b"4",
    },
    "org/quants": {name: name.encode() for name in (*QUANTISED, *SPLIT)} | {"config.json": b"{}"},
    "org/one": {"folder/m-[1].gguf": b"GGUF"},
    "org/pickled": {**SMALL, "pytorch_model.bin": b"pickle"},
    "org/adapter": {"adapter_config.json": b"{}", "adapter_model.safetensors": b"1"},
    "org/torn": {SPLIT[0]: b"GGUF"},
    "org/gated": {**SMALL, "model.safetensors": b"weights"},
}  # fmt: skip


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.delenv("INFER_MODELS", raising=False)
    return tmp_path / "hub"


def fill(cache: Path, repo: str, files: dict[str, bytes], revision: str = "main") -> Path:
    """Fill a cache as the hub's library does: blobs, and links to them in the commit's folder."""
    folder = cache / f"models--{repo.replace('/', '--')}"
    (folder / "refs").mkdir(parents=True, exist_ok=True)
    (folder / "blobs").mkdir(exist_ok=True)
    (folder / "refs" / revision).write_text(COMMIT)
    for index, (name, content) in enumerate(files.items()):
        path = folder / "snapshots" / COMMIT / name
        path.parent.mkdir(parents=True, exist_ok=True)
        (folder / "blobs" / str(index)).write_bytes(content)
        path.symlink_to(folder / "blobs" / str(index))
    return folder / "snapshots" / COMMIT


NAMES = [
    ("org/repo", HubName("org/repo")),
    ("a.b-c/d_e.1:Q4_K_M", HubName("a.b-c/d_e.1", variant="Q4_K_M")),
    ("org/repo@v1.0:sub/m.gguf", HubName("org/repo", "v1.0", "sub/m.gguf")),
    ("org/repo@refs/pr/3", HubName("org/repo", "refs/pr/3")),
    ("hf.co/org/repo:Q4_K_M", HubName("org/repo", variant="Q4_K_M")),
    ("https://huggingface.co/org/repo:Q4_K_M", HubName("org/repo", variant="Q4_K_M")),
    ("hf.co/org/repo:latest", HubName("org/repo")),
]


@pytest.mark.parametrize(("text", "name"), NAMES)
def test_a_name_on_the_hub_has_a_revision_and_a_file(text: str, name: HubName) -> None:
    assert (parse_hub_name(text), parse_hub_name(str(name))) == (name, name)
    assert text.removesuffix(":latest").endswith(str(name))


@pytest.mark.parametrize(
    "text",
    ["repo", "a/b/c", "/a/b", "./b", "../b", "a/..", "a/b@../x", "a/b:../x.gguf", "a/b:x:y", "a b/c", "a/b@", "a/b:",
     "models/m.gguf", "a/model.safetensors", "a/b:/etc/x.gguf", "a\n/b", "C:\\a/b"],
)  # fmt: skip
def test_impossible_names_are_not_names_on_the_hub(text: str) -> None:
    assert parse_hub_name(text) is None


VARIANTS = [
    *(("Q4_K_M", "m-Q4_K_M.gguf"), ("q4_k_s", "m-Q4_K_S.gguf"), ("Q4_0", "m-Q4_0.gguf"), ("bf16", SPLIT[0])),
    *(("UD-Q4_K_XL", "m-UD-Q4_K_XL.gguf"), (SPLIT[2], SPLIT[0]), ("m-IQ4_NL.gguf", "m-IQ4_NL.gguf")),
]


@pytest.mark.parametrize(("variant", "entry"), VARIANTS)
def test_a_quantisation_or_a_file_is_one_model(variant: str, entry: str) -> None:
    chosen = choose(HubName("org/quants", variant=variant), REPOSITORIES["org/quants"], None)
    assert (chosen.entry, chosen.weights) == (entry, SPLIT if entry == SPLIT[0] else (entry,))


UNKNOWN_CHOICES = [
    ("org/quants", None, r"the GGUF files .*, m-Q4_0\.gguf, .*; name one, as in org/quants:Q4_K_M"),
    ("org/quants", "Q4_K", r"has no Q4_K: it has the GGUF files BF16/m-BF16-00001-of-00003\.gguf, m-IQ4"),
    ("org/quants", "4", "org/quants has no 4: it has"),
    ("org/plain", "Q8_0", r"org/plain has no Q8_0: it has the GGUF files m\.gguf"),
    ("org/pickled", None, r"org/pickled: its weights are pickled \(pytorch_model\.bin\), which can run code"),
    ("org/adapter", None, "it is an adapter, not a model"),
]


@pytest.mark.parametrize(("repo", "variant", "reason"), UNKNOWN_CHOICES)
def test_an_unknown_choice_lists_the_known_ones(repo: str, variant: str | None, reason: str) -> None:
    check_refused(lambda: choose(HubName(repo, variant=variant), REPOSITORIES[repo], None), reason, ModelError)


def test_projectors_are_no_models() -> None:
    assert gguf_models(["mmproj-F16.gguf", "imatrix_unsloth.gguf", "m.gguf"]) == [["m.gguf"]]


@pytest.mark.parametrize("name", ["org/plain", "org/sharded", "org/quants:Q4_0", "org/quants:BF16", "org/one"])
@pytest.mark.parametrize("revision", ["main", "v2", COMMIT])
def test_the_cache_is_enough_without_network(cache: Path, name: str, revision: str) -> None:
    repo, _, variant = name.partition(":")
    files = {file: x for file, x in REPOSITORIES[repo].items() if not file.endswith(".bin")}
    snapshot = fill(cache, repo, files, "main" if revision == COMMIT else revision)
    path = resolve(repo + ("" if revision == "main" else f"@{revision}") + (f":{variant}" if variant else ""))
    entries = {"org/quants:Q4_0": "m-Q4_0.gguf", "org/quants:BF16": SPLIT[0], "org/one": "folder/m-[1].gguf"}
    assert path == snapshot / entries.get(name, "")


@pytest.mark.parametrize(
    ("repo", "missing"),
    [("org/plain", "model.safetensors"), ("org/plain", "tokenizer.json"), ("org/sharded", SHARDS[1]), (BF16, SPLIT[1])],
)
def test_a_cache_that_holds_a_part_is_not_enough(cache: Path, repo: str, missing: str) -> None:
    files = dict(REPOSITORIES[repo.partition(":")[0]])
    files.pop("m.gguf", None)
    snapshot = fill(cache, repo.partition(":")[0], files)
    assert find_cached(HubName(repo.partition(":")[0], variant=repo.partition(":")[2] or None)) is not None
    (snapshot / missing).resolve().unlink()  # a dangling link is not a file
    check_refused(lambda: resolve(repo), f"^{repo} is not in the hub's local cache, .*hub, and HF_HUB")


def test_a_vocab_txt_is_enough_in_place_of_a_tokenizer_json(cache: Path) -> None:
    files = dict(REPOSITORIES["org/plain"])
    del files["m.gguf"], files["tokenizer.json"]
    fill(cache, "org/plain", files)
    assert find_cached(HubName("org/plain")) is None
    snapshot = fill(cache, "org/words", files | {"vocab.txt": b"[UNK]"})
    assert find_cached(HubName("org/words")) == snapshot
    assert "vocab.txt" in choose(HubName("org/plain"), [*files, "vocab.txt"], None).small


def test_offline_says_what_to_do(cache: Path) -> None:
    with pytest.raises(InvalidRequestError, match=r"org/none@v1:Q4_0 .* HF_HUB_OFFLINE is set: unset it") as error:
        resolve("org/none@v1:Q4_0")
    assert error.value.exit_status == 2
    assert "huggingface_hub" not in sys.modules or not cache.exists()


def test_offline_a_name_of_several_cached_files_is_refused_with_their_names(cache: Path) -> None:
    fill(cache, "org/two", {"m-Q4_K_M.gguf": b"GGUF", "m-Q8_0.gguf": b"GGUF"})
    check_refused(lambda: resolve("org/two"), r"it has the GGUF files m-Q4_K_M.gguf, m-Q8_0.gguf; name one")


def test_a_folder_of_that_name_wins(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(cache, "org/plain", REPOSITORIES["org/plain"])
    (tmp_path / "org" / "plain").mkdir(parents=True)
    (tmp_path / "org" / "plain" / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    assert resolve("org/plain") == Path("org/plain")


def test_names_in_a_models_folder_precede_the_hub(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INFER_MODELS", str(tmp_path / "models"))
    (tmp_path / "models" / "org").mkdir(parents=True)
    for name in ("mine.gguf", "org/other.gguf"):
        (tmp_path / "models" / name).write_bytes(b"GGUF")
    assert resolve("mine") == resolve("mine.gguf") == tmp_path / "models" / "mine.gguf"
    assert resolve("org/other") == tmp_path / "models" / "org" / "other.gguf"


CACHES = [({"HF_HUB_CACHE": "/own", "HF_HOME": "/home"}, "/own"), ({"HF_HOME": "/home"}, "/home/hub")]
CACHES += [({"XDG_CACHE_HOME": "/shared"}, "/shared/huggingface/hub"), ({"HOME": "/me"}, "/me/.cache/huggingface/hub")]


@pytest.mark.parametrize(("environment", "folder"), CACHES)
def test_the_cache_is_the_librarys(environment: dict[str, str], folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HF_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert hub_cache_folder() == Path(folder)


_ASK = """
import json, sys
from infer.files import resolve
from infer.errors import InferError
answers = {}
for name in sys.argv[1:]:
    try:
        answers[name] = str(resolve(name))
    except InferError as error:
        answers[name] = f"{type(error).__name__}: {error}"
assert "torch" not in sys.modules
print(json.dumps(answers))
"""


def ask(hub: FakeHub, cache: Path, *names: str, **environment: str) -> dict[str, Any]:
    """Return the models that names stand for, in a process with a fake hub."""
    own = {"HF_ENDPOINT": hub.url, "HF_HUB_CACHE": str(cache), "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_TELEMETRY": "1"}
    inherited = {name: value for name, value in os.environ.items() if name.upper() not in ("HF_TOKEN", "HTTP_PROXY")}
    command = python_command(_ASK, *names)
    done = subprocess.run(
        command, env={**inherited, "NO_PROXY": "*", **own, **environment}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""  # progress is for terminals
    answers: dict[str, Any] = json.loads(done.stdout)
    return answers


@pytest.mark.slow
def test_only_what_is_needed_is_downloaded_and_once(tmp_path: Path) -> None:
    cache, names = tmp_path / "hub", ("org/plain", "org/sharded", "org/quants:q4_k_m", BF16, "org/one")
    with serving(FakeHub(REPOSITORIES)) as hub:
        first = ask(hub, cache, *names)
        downloads = sorted(hub.downloads)
        hub.requests.clear()
        assert (ask(hub, cache, *names), hub.requests) == (first, [])
    folder = cache / "models--org--quants" / "snapshots" / COMMIT
    assert first["org/quants:q4_k_m"] == str(folder / "m-Q4_K_M.gguf")
    assert first["org/quants:BF16"] == str(folder / SPLIT[0])
    sharded = set(REPOSITORIES["org/sharded"]) - {"consolidated.safetensors", "onnx/model.onnx"}
    assert {path.name for path in Path(first["org/sharded"]).iterdir()} == {name.partition("/")[0] for name in sharded}
    assert downloads == sorted([*SMALL, "model.safetensors", *sharded, "m-Q4_K_M.gguf", *SPLIT, "folder/m-[1].gguf"])
    for name, file in (("org/plain", "model.safetensors"), ("org/sharded", SHARDS[1])):
        assert (Path(first[name]) / file).read_bytes() == REPOSITORIES[name][file]


@pytest.mark.slow
def test_a_refusal_of_the_hub_is_one_line(tmp_path: Path) -> None:
    expected = {
        "org/none": r"RequestError: org/none is not in .*the hub has no such repository, or it is private: .* HF_TOKEN",
        "org/gated": r"it is gated: accept its terms at https://huggingface\.co/org/gated and set HF_TOKEN",
        "org/plain@v9": "the hub's org/plain has no revision v9",
        "org/quants": "ModelError: org/quants: it has the GGUF files",
        "org/torn": "ModelError: org/torn: the repository lacks BF16/m-BF16-00002-of-00003.gguf, .*, a part of",
        "org/pickled": "ModelError: org/pickled: its weights are pickled",
    }
    with serving(FakeHub(REPOSITORIES, frozenset({"org/gated"}))) as hub:
        answers = ask(hub, tmp_path / "hub", *expected)
        assert hub.downloads == []
        opened = ask(hub, tmp_path / "hub", "org/gated", HF_TOKEN="hf_secret")
        assert opened["org/gated"].endswith(COMMIT)
        assert hub.tokens == {"Bearer hf_secret"}
    for name, reason in expected.items():
        assert "\n" not in answers[name]
        assert "hf_secret" not in answers[name]
        with pytest.raises(AssertionError, match=reason):
            raise AssertionError(answers[name])


@pytest.mark.slow
def test_an_unreachable_hub_is_named(tmp_path: Path) -> None:
    (answer,) = ask(FakeHub({}, url="http://127.0.0.1:9"), tmp_path / "hub", "org/plain").values()
    assert answer.startswith("InvalidRequestError: org/plain is not in the hub's local cache")
    assert "and the hub cannot be reached" in answer


def test_models_in_the_cache_open(cache: Path) -> None:
    """Links of the cache point out of the commit's folder, to the blobs next to it."""
    import gguf_files

    whole = gguf_files.write_model(cache.parent / "m.gguf")
    fill(cache, "org/real", {"real-F32.gguf": whole.read_bytes()})
    assert open_checkpoint("org/real").tensors.keys() == open_checkpoint(whole).tensors.keys()


def test_a_removed_model_is_deleted_with_the_files_that_only_it_has(cache: Path) -> None:
    shared = {name: name.encode() for name in ("m-Q4_0.gguf", "m-Q8_0.gguf")}
    snapshot = fill(cache, "org/two", shared)
    (snapshot / "copy-Q8_0.gguf").symlink_to((snapshot / "m-Q8_0.gguf").resolve())
    assert remove_cached(HubName("org/two", variant="m-Q8_0.gguf")) == 0, "the copy has the same content"
    assert remove_cached(HubName("org/two", variant="Q4_0")) == len("m-Q4_0.gguf")
    assert find_cached(HubName("org/two", variant="copy-Q8_0.gguf")) is not None
    assert remove_cached(HubName("org/two")) == len("m-Q8_0.gguf")
    assert not list(cache.iterdir())
    check_refused(lambda: remove_cached(HubName("org/two")), "is not in the hub's local cache")
    fill(cache, "org/plain", REPOSITORIES["org/plain"])
    remove_cached(HubName("org/plain"))
    assert find_cached(HubName("org/plain", variant="m.gguf")) is not None, "another model of the repository"
