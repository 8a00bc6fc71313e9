"""`infer serve` of each kind of model, started as a user starts it: the command, a folder, and a client."""

import os
import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from encoder_models import BY_NAME, make_encoder, write_modules
from encoder_tokenizers import make_bert_folder
from fake_hub import COMMIT
from idle import until
from reranker_model import make_logit_score
from served import SECONDS
from test_decoders_without_mask import make_folder as make_gemma
from test_session import make_model
from watched import python_command

_COMMAND = "import runpy; runpy.run_module('infer', run_name='__main__')"
EMBED = {"input": ["hello world", "hello"]}
RANK = {"query": "hello", "documents": ["paris", "hello world"]}
CHAT = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}


def make_bert(folder: Path, *, has_modules: bool = False, **settings: Any) -> None:
    tokenizer = make_bert_folder(folder)
    make_encoder(BY_NAME["bert"], folder, vocab_size=len(tokenizer), **settings)
    if has_modules:
        write_modules(folder, pooling_mode_cls_token=True)


# `make test` tries the fourth.
MAKERS: dict[str, Any] = {
    "gemma": lambda folder: make_gemma(folder, "embedding-gemma"),
    "encoder": make_bert,
    "ranks": lambda folder: make_bert(folder, id2label={0: "LABEL_0"}),
    "sentences": lambda folder: make_bert(folder, has_modules=True),
    "labels": lambda folder: make_bert(folder, id2label={0: "bad", 1: "good"}),
    "reranker": make_logit_score,
}
ANSWERED: dict[str, dict[str, dict[str, Any]]] = {
    "encoder": {"/v1/embeddings": EMBED, "/api/embed": EMBED},
    "sentences": {"/v1/embeddings": EMBED, "/api/embed": EMBED, "/v1/rerank": RANK},
    "labels": {"/v1/classify": {"input": "hello"}},
    "gemma": {"/v1/embeddings": EMBED},
    "ranks": {"/v1/rerank": RANK},
    "reranker": {"/v1/rerank": RANK},
}


@contextmanager
def served(*arguments: object, **environment: str) -> Iterator[httpx.Client]:
    """Run `infer serve` until the end of `with`. The client's server is ready."""
    command = python_command(_COMMAND, "serve", *arguments, "--port", "0", "--threads", "1")
    own = os.environ | environment
    with subprocess.Popen(command, env=own, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        said = list[str]()
        try:
            while not (url := re.search(r"http://[\d.:]+", said[-1] if said else "")):
                said.append(process.stderr.readline())
                assert said[-1], f"the server ended: {said}"
            with httpx.Client(base_url=url[0], timeout=SECONDS, trust_env=False) as client:
                until(lambda: client.get("/ready").status_code == 200)
                yield client
        finally:
            process.terminate()
            process.communicate(timeout=SECONDS)
    assert process.returncode == 0


@pytest.mark.slow(cases=1)
@pytest.mark.parametrize("kind", MAKERS)
def test_a_model_of_each_kind_is_served_for_what_it_can_do(kind: str, tmp_path: Path) -> None:
    MAKERS[kind](tmp_path / kind)
    with served(tmp_path / kind) as client:
        name = client.get("/v1/models").json()["data"][0]["id"]
        for path, body in ANSWERED[kind].items():
            found = client.post(path, json={"model": name, **body})
            assert found.status_code == 200, (path, found.text)
        for path in ("/health", "/metrics", "/props", "/v1/models", "/api/ps", "/api/tags"):
            assert client.get(path).status_code == 200, path
        assert client.post("/api/show", json={"model": name}).status_code == 200
        if kind != "reranker":
            for path in ("/v1/chat/completions", "/v1/messages", "/api/chat"):
                refused = client.post(path, json={"model": name, **CHAT})
                assert refused.status_code == 400, (path, refused.text)
                assert "is an encoder and generates no text" in refused.text


@pytest.mark.slow
def test_an_encoder_and_a_decoder_are_served_together(tmp_path: Path) -> None:
    make_bert(tmp_path / "vectors")
    make_model(tmp_path / "text")
    with served("-m", tmp_path / "vectors", "-m", tmp_path / "text") as client:
        assert client.post("/v1/embeddings", json={"model": "vectors", **EMBED}).status_code == 200
        found = client.post("/v1/completions", json={"model": "text", "prompt": "hello", "max_tokens": 2})
        assert found.status_code == 200, found.text


@pytest.mark.slow
def test_a_pulled_model_is_served_under_each_spelling_of_its_name(tmp_path: Path) -> None:
    snapshot = tmp_path / "models--org--one" / "snapshots" / COMMIT
    make_model(snapshot)
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text(COMMIT)
    environment = {"HF_HUB_CACHE": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    with served("--load-on-demand", "--allow-pull", **environment) as client:
        pulled = client.post("/api/pull", json={"model": "hf.co/org/one", "stream": False})
        assert pulled.json() == {"status": "success"}
        for name in ("hf.co/org/one", "org/one", "org/one:latest", "org/one@main", f"org/one@{COMMIT}"):
            asked = {"model": name, "prompt": "hello", "stream": False, "options": {"num_predict": 2}}
            assert client.post("/api/generate", json=asked).status_code == 200, name
            assert client.post("/api/show", json={"model": name}).status_code == 200, name
            asked = {"model": name, "prompt": "hello", "max_tokens": 2}
            assert client.post("/v1/completions", json=asked).status_code == 200, name
        asked = {"model": "org/other", "prompt": "hello", "max_tokens": 2}
        assert client.post("/v1/completions", json=asked).status_code == 404


@pytest.mark.slow
def test_the_command_asks_no_proxy_for_a_server_of_this_machine(tmp_path: Path) -> None:
    make_model(tmp_path / "text")
    nobody = dict.fromkeys(("HTTP_PROXY", "http_proxy"), "http://127.0.0.1:9")
    with served(tmp_path / "text") as client:
        host = str(client.base_url).removeprefix("http://").rstrip("/")
        for url in (f"http://{host}", host, host.replace("127.0.0.1", "localhost")):
            command = python_command(_COMMAND, "ps", "--url", url)
            done = subprocess.run(command, env=os.environ | nobody, capture_output=True, text=True, timeout=SECONDS)
            assert (done.returncode, "text" in done.stdout) == (0, True), done.stderr
    command = python_command(_COMMAND, "ps", "--url", "http://192.0.2.1")
    done = subprocess.run(command, env=os.environ | nobody, capture_output=True, text=True, timeout=SECONDS)
    assert "no server answers at http://192.0.2.1 through the proxy http://127.0.0.1:9" in done.stderr
