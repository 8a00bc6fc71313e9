"""Claims about the lines that a server prints once at its start. They can be pasted into other programs."""

import re
import shlex
import signal
import socket
import subprocess
import sys
import time
import tomllib
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from infer.cli.commands.server_commands import client_lines
from terminals import SECONDS, plain, terminal

NAMES = ["url", "model", "slots", "memory", "limits", "ends"]


def lines(url: str = "http://127.0.0.1:8000", model: str = "smollm2", *, has_keys: bool = False) -> dict[str, str]:
    return dict(client_lines(url, model, has_keys=has_keys))


def shell_words(line: str) -> tuple[dict[str, str], list[str]]:
    """Return the environment and the command of a line."""
    words = shlex.split(line)
    count = next(index for index, word in enumerate(words) if not re.match(r"[A-Z_]+=", word))
    return dict(word.split("=", 1) for word in words[:count]), words[count:]


def codex_settings(command: list[str]) -> dict[str, Any]:
    """Return the settings that Codex reads from its options, each a line of TOML."""
    assert (command[0], command[1::2]) == ("codex", ["-c", "-c", "-m"])
    assert command[2] == "model_provider=infer"
    return tomllib.loads(command[4])["model_providers"]["infer"]


@pytest.mark.parametrize("has_keys", [False, True])
@pytest.mark.parametrize("model", ["smollm2", "org/repo:Q4_K_M", "/my models/it's.gguf"])
def test_each_line_is_read_by_its_program_as_it_is_meant(model: str, has_keys: bool) -> None:
    key = "YOUR_KEY" if has_keys else "none"
    found = lines(model=model, has_keys=has_keys)
    assert list(found) == ["Claude Code", "Codex", "opencode", "Continue", "Open WebUI"]
    environment, command = shell_words(found["Claude Code"])
    assert environment == {
        "ANTHROPIC_BASE_URL": "http://127.0.0.1:8000", "ANTHROPIC_AUTH_TOKEN": key, "ANTHROPIC_MODEL": model,
        "ANTHROPIC_DEFAULT_HAIKU_MODEL": model,
    }  # fmt: skip
    assert command == ["claude"]
    environment, command = shell_words(found["Codex"])
    assert environment == ({"INFER_API_KEY": key} if has_keys else {})
    key_of = {"env_key": "INFER_API_KEY"} if has_keys else {}
    provider = {"name": "infer", "base_url": "http://127.0.0.1:8000/v1", "wire_api": "responses"}
    assert (codex_settings(command), command[-1]) == (provider | key_of, model)
    assert yaml.safe_load(found["Continue"]) == {
        "models": [{"name": model, "provider": "openai", "model": model, "apiBase": "http://127.0.0.1:8000/v1",
                    "apiKey": key}]
    }  # fmt: skip
    environment, command = shell_words(found["Open WebUI"])
    assert environment == {"OPENAI_API_BASE_URL": "http://127.0.0.1:8000/v1", "OPENAI_API_KEY": key}
    assert command == ["open-webui", "serve"]


LOOPBACKS = [("http://0.0.0.0:80", "http://127.0.0.1:80"), ("https://[::]:80", "https://[::1]:80")]
LOOPBACKS += [("http://me:1", "http://me:1")]


@pytest.mark.parametrize(("url", "base"), LOOPBACKS)
def test_a_server_that_listens_everywhere_is_reached_by_the_loopback(url: str, base: str) -> None:
    assert all(base in line and "0.0.0.0" not in line for line in lines(url).values())


@pytest.mark.slow
def test_a_terminal_is_shown_the_page_and_the_lines(folder: Path) -> None:
    command = [sys.executable, "-m", "infer", "serve", str(folder), "--port", "0", "--served-model-name", "tiny"]
    with terminal(command, columns=300) as screen:
        shown = plain(screen.until("this context holds"))
        url = re.findall(r"^url +(http://127\.0\.0\.1:\d+)/v1 \(no key needed\)$", shown, re.MULTILINE)[0]
        assert f"open {url} in a browser" in shown
        for program, line in client_lines(url, "tiny", has_keys=False):
            assert f"  {program:<12}{line}\n" in shown
        screen.process.send_signal(signal.SIGTERM)
        screen.ended(0)


@pytest.mark.slow
def test_a_quiet_server_shows_a_terminal_nothing(folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "infer", "serve", str(folder), "--port", str(port), "-q", "--no-access-log"]
    with terminal(command) as screen:
        wait_until_ready(f"http://127.0.0.1:{port}")
        screen.process.send_signal(signal.SIGTERM)
        assert screen.ended(0) == ""


@pytest.mark.slow
def test_the_banner_of_replicas_is_written_once_and_as_scripts_know_it(folder: Path) -> None:
    command = [sys.executable, "-m", "infer", "serve", str(folder), "--port", "0", "--replicas", "2"]
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            first = process.stderr.readline()
            url = re.findall(r"^loading .*; (http://\S+) already answers$", first)[0]
            wait_until_ready(url)
            wait_for_replicas(url, 2)
            process.send_signal(signal.SIGTERM)
            _, rest = process.communicate(timeout=SECONDS)
        finally:
            process.kill()
    written = [line.split()[0] for line in rest.splitlines() if line.split()[:1] and line.split()[0] in NAMES]
    assert written == NAMES
    assert "ANTHROPIC" not in rest


def wait_until_ready(url: str) -> None:
    ends = time.monotonic() + SECONDS
    while time.monotonic() < ends:
        with suppress(httpx.TransportError):
            if httpx.get(f"{url}/ready", timeout=SECONDS).is_success:
                return
        time.sleep(0.05)
    raise TimeoutError


def wait_for_replicas(url: str, count: int) -> None:
    """Wait until each replica has a model and reports it."""
    while len(set(re.findall(r'replica="(\w+)"', httpx.get(f"{url}/metrics", timeout=SECONDS).text))) < count:
        time.sleep(0.05)
