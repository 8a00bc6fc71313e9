"""Claude Code and Codex CLI, from their packages, against a served SmolLM2, and schemathesis against random weights.

A gateway in the test of the agents forces the first call, of a harmless tool, since the model itself seldom makes one.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.responses import Response

from assets import asset
from idle import until_idle
from infer import LLM
from infer.serving.server.app import ROUTES
from infer.serving.server.endpoint import ApiRequest, ApiRoute
from served import Served, serving
from test_session import make_model

pytestmark = pytest.mark.slow

CONTEXT = 16384
SECONDS = 500
PROMPT = "Say hello."


class Gateway:
    """The routes of a server. It forces a call in each conversation's first request, and records all statuses."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.statuses: list[int] = []

    def table(self) -> list[ApiRoute]:
        return [self._noted(route) if route.path in ("/v1/messages", "/v1/responses") else route for route in ROUTES]

    def _forced(self, body: dict[str, Any]) -> dict[str, Any]:
        """Return a call for the first request, with fixed arguments or none.

        Other answers end early, because an answer that ends at its limit is an error for the agents.
        """
        if "input" in body:
            is_first = all(item.get("type") != "function_call_output" for item in body["input"])
            goal = {"type": "function", "name": "get_goal"}
            return {"tool_choice": goal} if is_first else {"regex": "[A-Z][a-z ]{3,40}[.]"}
        kinds = {block["type"] for turn in body["messages"] for block in blocks_of(turn)}
        path = {"type": "object", "properties": {"file_path": {"const": "missing.txt"}}, "required": ["file_path"]}
        tools = [tool | {"input_schema": path | {"additionalProperties": False}} for tool in body["tools"]]
        if "tool_result" in kinds:
            return {"tools": tools, "stop_sequences": list(".,!\n")}
        return {"tools": tools, "tool_choice": {"type": "tool", "name": "Read"}}

    def _noted(self, route: ApiRoute) -> ApiRoute:
        async def handler(request: ApiRequest) -> Response:
            body = json.loads(await request.body())
            self.bodies.append(body)
            body |= self._forced(body)
            request._body = json.dumps(body).encode()
            try:
                response = await route.handler(request)
            except Exception:
                self.statuses.append(400)
                raise
            self.statuses.append(response.status_code)
            return response

        return route._replace(handler=handler)


@pytest.fixture(scope="module")
def llm(smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    """Return the model with a longer context. Beyond 8,192 tokens its answers are poor, which does not matter here."""
    content = bytearray(smollm2_path.read_bytes())
    place = content.index(b"llama.context_length") + len(b"llama.context_length") + 4  # after the value's type
    assert int.from_bytes(content[place : place + 4], "little") == 8192
    content[place : place + 4] = CONTEXT.to_bytes(4, "little")
    path = tmp_path_factory.mktemp("longer") / "smollm2.gguf"
    path.write_bytes(content)
    with LLM(path, max_seq_len=CONTEXT, reuse_prefixes=True) as llm:
        yield llm


@pytest.fixture
def gateway() -> Gateway:
    return Gateway()


@pytest.fixture
def served(llm: LLM, gateway: Gateway) -> Iterator[Served]:
    with serving(llm, model="smollm2", table=gateway.table(), max_ttft=float(SECONDS)) as served:
        yield served
        until_idle(served)


def run(command: list[str], folder: Path, **environment: str) -> str:
    """Return the output of the agent. It has an empty home folder, and no person to ask."""
    kept = {name: os.environ[name] for name in ("PATH", "TMPDIR") if name in os.environ}
    home, work = folder / "home", folder / "work"
    for each in (home, work):
        each.mkdir(exist_ok=True)
    environment |= kept | {"HOME": str(home)}
    settings: dict[str, Any] = {"stdin": subprocess.DEVNULL, "capture_output": True, "text": True, "timeout": SECONDS}
    done = subprocess.run(command, cwd=work, env=environment, check=False, **settings)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


def test_claude_code_runs_a_tool_and_gets_text(served: Served, gateway: Gateway, tmp_path: Path) -> None:
    (program,) = asset("clients/agents").glob("node_modules/@anthropic-ai/claude-code-*/claude*")
    command = [str(program), "-p", PROMPT, "--output-format", "stream-json", "--verbose", "--model", "smollm2"]
    command += ["--tools", "Read", "--disable-slash-commands", "--system-prompt", "You are an assistant."]
    environment = {"ANTHROPIC_BASE_URL": served.url, "ANTHROPIC_AUTH_TOKEN": "none", "IS_SANDBOX": "1"}
    environment |= {"CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1", "CLAUDE_CODE_MAX_OUTPUT_TOKENS": "256"}
    environment |= {"DISABLE_AUTOUPDATER": "1", "DISABLE_TELEMETRY": "1"}
    printed = run([*command, "--dangerously-skip-permissions"], tmp_path, **environment)
    lines = [json.loads(line) for line in printed.splitlines()]
    assert (lines[-1]["type"], set(gateway.statuses)) == ("result", {200})
    kinds = [block["type"] for body in gateway.bodies for turn in body["messages"] for block in blocks_of(turn)]
    assert "tool_result" in kinds
    assert lines[-1]["usage"]["cache_read_input_tokens"] > 0


def blocks_of(turn: dict[str, Any]) -> list[dict[str, Any]]:
    content = turn["content"]
    return content if isinstance(content, list) else [{"type": "text", "text": content}]


def test_codex_cli_runs_a_tool_and_gets_a_text(served: Served, gateway: Gateway, node: str, tmp_path: Path) -> None:
    provider = {"name": "infer", "base_url": f"{served.url}/v1", "wire_api": "responses", "env_key": "NO_KEY"}
    settings = {"model_provider": "infer", "model": "smollm2"}
    settings |= {f"model_providers.infer.{name}": value for name, value in provider.items()}
    options = [part for name, value in settings.items() for part in ("-c", f"{name}={json.dumps(value)}")]
    program = asset("clients/agents") / "node_modules/@openai/codex/bin/codex.js"
    command = [node, str(program), "exec", "--skip-git-repo-check", "--json", "--sandbox", "read-only"]
    (tmp_path / "codex").mkdir()
    printed = run([*command, *options, PROMPT], tmp_path, CODEX_HOME=str(tmp_path / "codex"), NO_KEY="none")
    lines = [json.loads(line) for line in printed.splitlines() if line.startswith("{")]
    assert "turn.completed" in [line["type"] for line in lines]
    assert set(gateway.statuses) == {200}
    items = [item for body in gateway.bodies for item in body["input"]]
    assert [item["name"] for item in items if item["type"] == "function_call"][:1] == ["get_goal"]
    assert "function_call_output" in [item["type"] for item in items]
    (usage,) = (line["usage"] for line in lines if line["type"] == "turn.completed")
    assert usage["cached_input_tokens"] > 0


# Fuzzing


CHECKS = (
    "not_a_server_error,status_code_conformance,content_type_conformance,response_headers_conformance,"
    "response_schema_conformance,negative_data_rejection,unsupported_method"
)


@pytest.mark.filterwarnings("ignore")  # warnings about schemas that assert nothing
@pytest.mark.parametrize("phase", ["coverage", "fuzzing", "stateful"])
def test_requests_of_schemathesis_are_answered_as_described(phase: str, tmp_path: Path) -> None:
    pytest.importorskip("schemathesis")
    with LLM(make_model(tmp_path), max_seq_len=128) as llm, serving(llm, model="tiny", allow_embeddings=True) as served:
        command = [
            sys.executable, "-m", "schemathesis.cli", "run", f"{served.url}/openapi.json", "--phases", phase,
            "--checks", CHECKS, "--max-examples", "100", "--seed", "1", "--no-color", "--request-timeout", "60",
            "--exclude-path", "/v1/engine/events",  # it never ends
            "--exclude-path", "/api/pull",  # it calls the hub
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, timeout=1800, check=False, cwd=tmp_path)
        assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
        until_idle(served)
