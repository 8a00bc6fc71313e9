"""Claims about `infer launch`, with a program on PATH that stands for each client and writes down what it gets."""

import json
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from cases import cases
from commands import refused, run
from infer.serving.server.endpoint import ApiRequest, get
from served import SECONDS, Served, served_model, serving

CLIENT = f"""#!{sys.executable}
import json, os, sys, time
with open(os.environ["SEEN"] + ".part", "w") as file:
    json.dump([sys.argv[1:], dict(os.environ)], file)
os.rename(file.name, os.environ["SEEN"])
time.sleep(600 if "wait" in sys.argv else 0)
sys.exit(7)
"""
served = served_model("llm")


@pytest.fixture
def seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the file into which each client writes its arguments and its environment."""
    for name in ("claude", "codex", "opencode"):
        (tmp_path / name).write_text(CLIENT)
        (tmp_path / name).chmod(0o700)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("SEEN", str(tmp_path / "seen.json"))
    return tmp_path / "seen.json"


@pytest.fixture
def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


def is_open(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


@pytest.mark.parametrize("key", ["", "secret"])
def test_a_client_gets_the_address_the_model_and_the_key(served: Served, seen: Path, key: str) -> None:
    def launched(*arguments: str) -> tuple[list[str], dict[str, str]]:
        asked = ["--url", f"{url}/v1", *(["--api-key", key] if key else [])]
        assert "this context holds" in run("launch", arguments[0], *asked, *arguments[1:], status=7).err
        words, environment = json.loads(seen.read_text())
        return words, environment

    url = f"http://127.0.0.1:{served.port}"
    words, environment = launched("claude", "--", "--resume", "--", "-v")
    assert words == ["--resume", "--", "-v"]
    given = [environment[f"ANTHROPIC_{name}"] for name in ("BASE_URL", "AUTH_TOKEN", "MODEL")]
    assert given == [url, key or "none", "tiny"]
    words, environment = launched("codex", "tiny")
    assert (words[-2:], words[1], environment.get("INFER_API_KEY", "")) == (["-m", "tiny"], "model_provider=infer", key)
    assert (f'base_url="{url}/v1"' in words[3], "env_key" in words[3]) == (True, bool(key))
    words, environment = launched("opencode")
    provider = json.loads(environment["OPENCODE_CONFIG_CONTENT"])["provider"]["infer"]
    assert (words, list(provider["models"])) == (["--model", "infer/tiny"], ["tiny"])
    assert provider["options"] == {"baseURL": f"{url}/v1", "apiKey": key or "none"}


def test_a_launch_that_fails_is_one_line(served: Served, seen: Path) -> None:
    url = f"http://127.0.0.1:{served.port}"
    told = refused("launch", "codex", "other", "--url", url)
    assert told.startswith(f"other is not served at {url}, which serves tiny: name one of these")
    (seen.parent / "codex").unlink()
    assert refused("launch", "codex") == "codex is not installed: install Codex with npm install -g @openai/codex"
    told = refused("launch", "claude", "--url", "http://192.0.2.1:1", status=1)
    assert told.startswith("no server answers at http://192.0.2.1:1")


@cases(
    "is_read answer",
    (True, {"data": [{"id": "other", "status": "ok", "takes": 3, "memory_bytes": "?", "max_model_len": None}]}),
    (True, {"data": [{"id": "other", "status": {"value": None, "progress": "half", "error": None}}]}),
    *(
        (False, answer)
        for answer in ([], "a", {"models": []}, *({"data": each} for each in (1, [{}], ["a"], [{"id": 3}])))
    ),
)
def test_a_server_of_another_program_is_read_as_far_as_it_is_openai_s(seen: Path, is_read: bool, answer: Any) -> None:
    async def list_models(request: ApiRequest) -> Any:
        return answer

    with serving(None, table=[get("/v1/models", list_models), get("/ready", list_models)]) as other:
        url = f"http://127.0.0.1:{other.port}"
        if is_read:
            assert "other" in run("ps", "--url", url).out
            run("launch", "claude", "--url", url, status=7)
        else:
            for words in (["ps"], ["launch", "claude"]):
                told = refused(*words, "--url", url)
                assert told.startswith(f"{url} must list its models as OpenAI's API does, got ")


@pytest.mark.slow
def test_a_server_runs_as_long_as_the_client_that_it_was_started_for(folder: Path, seen: Path, free_port: int) -> None:
    url = f"http://127.0.0.1:{free_port}"
    told = refused("launch", "claude", seen.parent, "--url", url, status=1)
    assert told.startswith("the server has ended with status 3: ")
    run("launch", "claude", folder, "--url", url, status=7)
    assert json.loads(seen.read_text())[1]["ANTHROPIC_MODEL"] == str(folder)
    (seen.parent / "opencode").write_text("#!/no/such/program\n")
    run("launch", "opencode", folder, "--url", url, status=2)
    assert not is_open(free_port)


@pytest.mark.slow
def test_signals_end_the_client_and_the_server(folder: Path, seen: Path, free_port: int) -> None:
    url = f"http://127.0.0.1:{free_port}"
    command = [sys.executable, "-m", "infer", "launch", "claude", str(folder), "--url", url, "--", "wait"]
    for number, has_begun in ((signal.SIGTERM, seen.exists), (signal.SIGINT, lambda: is_open(free_port))):
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL)
        while not has_begun():
            time.sleep(0.05)
        process.send_signal(number)
        assert process.wait(SECONDS) == 128 + number
        assert not is_open(free_port)
