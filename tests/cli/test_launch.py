"""Claims about `infer launch`, with a program on PATH that stands for each client and writes down what it gets."""

import json
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from commands import refused, run
from served import SECONDS, Served, served_model

CLIENT = f"""#!{sys.executable}
import json, os, sys, time, urllib.request
base = os.environ["ANTHROPIC_BASE_URL"] if "ANTHROPIC_BASE_URL" in os.environ else None
models = json.load(urllib.request.urlopen(base + "/v1/models")) if base else None
text = json.dumps([sys.argv[1:], dict(os.environ), models])
open(os.environ["SEEN"] + ".part", "w").write(text)
os.rename(os.environ["SEEN"] + ".part", os.environ["SEEN"])
time.sleep(600 if "wait" in sys.argv else 0)
sys.exit(7)
"""
served = served_model("llm")


@pytest.fixture
def seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the file into which each client writes its arguments, its environment and the server's models."""
    for name in ("claude", "codex", "opencode"):
        (tmp_path / name).write_text(CLIENT)
        (tmp_path / name).chmod(0o700)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("SEEN", str(tmp_path / "seen.json"))
    return tmp_path / "seen.json"


def launched(seen: Path, *arguments: object) -> tuple[list[str], dict[str, str]]:
    run("launch", *arguments, status=7)
    words, environment, _ = json.loads(seen.read_text())
    return words, environment


@pytest.mark.parametrize("key", ["", "secret"])
def test_a_client_gets_the_address_the_model_and_the_key(served: Served, seen: Path, key: str) -> None:
    url = f"http://127.0.0.1:{served.port}"
    asked = ["--url", f"{url}/v1", *(["--api-key", key] if key else [])]
    words, environment = launched(seen, "claude", *asked, "--", "--resume", "--", "-v")
    assert words == ["--resume", "--", "-v"]
    assert [environment[f"ANTHROPIC_{name}"] for name in ("BASE_URL", "AUTH_TOKEN", "MODEL")] == [
        url, key or "none", "tiny",
    ]  # fmt: skip
    words, environment = launched(seen, "codex", "tiny", *asked)
    assert (words[-2:], words[1], environment.get("INFER_API_KEY", "")) == (["-m", "tiny"], "model_provider=infer", key)
    assert (f'base_url="{url}/v1"' in words[3], "env_key" in words[3]) == (True, bool(key))
    words, environment = launched(seen, "opencode", *asked)
    provider = json.loads(environment["OPENCODE_CONFIG_CONTENT"])["provider"]["infer"]
    assert (words, list(provider["models"])) == (["--model", "infer/tiny"], ["tiny"])
    assert provider["options"] == {"baseURL": f"{url}/v1", "apiKey": key or "none"}


def test_what_cannot_be_launched_is_one_line(served: Served, seen: Path) -> None:
    url = f"http://127.0.0.1:{served.port}"
    told = run("launch", "claude", "--url", url, status=7).err
    assert told.startswith("Claude Code and Codex send 10,000 to 25,000 tokens with a question; this context holds ")
    told = refused("launch", "codex", "other", "--url", url)
    assert told.startswith(f"other is not served at {url}, which serves tiny: name one of these")
    (seen.parent / "codex").unlink()
    assert refused("launch", "codex") == "codex is not installed: install Codex with npm install -g @openai/codex"
    told = refused("launch", "claude", "--url", "http://192.0.2.1:1", status=1)
    assert told.startswith("no server answers at http://192.0.2.1:1")
    (seen.parent / "claude").write_text("#!/no/such/program\n")
    run("launch", "claude", "--url", url, status=2)


@pytest.mark.slow
def test_a_server_runs_as_long_as_the_client_that_it_was_started_for(folder: Path, seen: Path) -> None:
    url = free_url()
    told = refused("launch", "claude", seen.parent, "--url", url, status=1)
    assert told.startswith("the server has ended with status 3: ")
    launched(seen, "claude", folder, "--url", url)
    assert json.loads(seen.read_text())[2]["data"][0]["id"] == str(folder)
    seen.unlink()
    (seen.parent / "opencode").write_text("#!/no/such/program\n")
    run("launch", "opencode", folder, "--url", url, status=2)
    assert not answers(url)


@pytest.mark.slow
def test_signals_end_the_client_and_the_server(folder: Path, seen: Path) -> None:
    url = free_url()
    for number, client_sees in ((signal.SIGTERM, True), (signal.SIGINT, False)):
        command = [sys.executable, "-m", "infer", "launch", "claude", str(folder), "--url", url, "--", "wait"]
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL)
        wait_until(seen.exists if client_sees else lambda: answers(url))
        process.send_signal(number)
        assert process.wait(60) == 128 + number
        assert not answers(url)
        seen.unlink(missing_ok=True)


def free_url() -> str:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return f"http://127.0.0.1:{free.getsockname()[1]}"


def answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/ready").status_code > 0
    except httpx.TransportError:
        return False


def wait_until(is_true: Any) -> None:
    ends = time.monotonic() + SECONDS
    while not is_true():
        assert time.monotonic() < ends
        time.sleep(0.05)
