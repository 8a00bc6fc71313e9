"""Programs that talk to a running server: `infer ps`, `infer stop`, and the clients that `infer launch` starts.

`infer launch` starts a server if none runs at the URL, and stops that server after the client has ended.
"""

import ipaddress
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from types import FrameType
from typing import Any, NamedTuple

from infer.cli.option_files import refusing
from infer.cli.process_streams import Terminated, handling
from infer.cli.server_options import ClientName, LaunchOptions, RunningServerOptions, ServerAddress, StopOptions
from infer.cli.terminal import Spinner, columns_of_rows, json_text, megabytes, note, print_report
from infer.errors import InferError, InvalidRequestError
from infer.system.spellings import plain_name

_SECONDS = 600.0  # a model is unloaded only after its answers have ended
_STATE_SECONDS, _STOP_SECONDS = 10.0, 10.0  # for the state of a server, and for its end
NO_KEY, KEY = "none", "YOUR_KEY"  # clients need a key even if the server needs none
# Tokens that coding agents send, and the context that they need.
_AGENT_PROMPT, _AGENT_CONTEXT = "10,000 to 25,000", 32_768
Settings = tuple[dict[str, str], list[str]]  # environment variables and arguments


class Client(NamedTuple):
    """A coding agent: its title, how it is installed, and its settings for a server's base URL, a model and a key.

    The key is empty if the server has none.
    """

    title: str
    install: str
    settings: Callable[[str, str, str], Settings]


def _claude(base: str, model: str, key: str) -> Settings:
    models = dict.fromkeys(("ANTHROPIC_MODEL", "ANTHROPIC_DEFAULT_HAIKU_MODEL"), model)
    return {"ANTHROPIC_BASE_URL": base, "ANTHROPIC_AUTH_TOKEN": key or NO_KEY, **models}, []


def _codex(base: str, model: str, key: str) -> Settings:
    env_key = ', env_key="INFER_API_KEY"' if key else ""
    provider = f'{{name="infer", base_url="{base}/v1", wire_api="responses"{env_key}}}'
    settings = ("model_provider=infer", f"model_providers.infer={provider}")
    return {"INFER_API_KEY": key} if key else {}, [*(word for each in settings for word in ("-c", each)), "-m", model]


def _opencode(base: str, model: str, key: str) -> Settings:
    options = {"baseURL": f"{base}/v1", "apiKey": key or NO_KEY}
    provider = {"npm": "@ai-sdk/openai-compatible", "name": "infer", "options": options, "models": {model: {}}}
    return {"OPENCODE_CONFIG_CONTENT": json_text({"provider": {"infer": provider}})}, ["--model", f"infer/{model}"]


CLIENTS: Mapping[ClientName, Client] = {
    "claude": Client("Claude Code", "npm install -g @anthropic-ai/claude-code", _claude),
    "codex": Client("Codex", "npm install -g @openai/codex", _codex),
    "opencode": Client("opencode", "npm install -g opencode-ai", _opencode),
}


def client_lines(url: str, model: str, *, has_keys: bool) -> Iterator[tuple[str, str]]:
    """Yield the title and the line of each client program. `url` has no path.

    The lines are shell commands, except for Continue, whose line belongs in its config.yaml.
    """
    key, base = KEY if has_keys else NO_KEY, page_url(url)
    for command, client in CLIENTS.items():
        environment, arguments = client.settings(base, model, KEY if has_keys else "")
        variables = [f"{name}={shlex.quote(value)}" for name, value in environment.items()]
        yield client.title, " ".join([*variables, command, *map(shlex.quote, arguments)])
    values = {"name": model, "provider": "openai", "model": model, "apiBase": f"{base}/v1", "apiKey": key}
    yield "Continue", f"models: [{json_text(values)}]"
    yield "Open WebUI", f"OPENAI_API_BASE_URL={base}/v1 OPENAI_API_KEY={key} open-webui serve"


def context_remark(context: int) -> str:
    """Return a warning if a context is too short for the questions of agents, else an empty text."""
    remark = f"Claude Code and Codex send {_AGENT_PROMPT} tokens with a question; this context holds {context:,}"
    return remark if context < _AGENT_CONTEXT else ""


def page_url(url: str) -> str:
    """Return the URL for a browser on this machine.

    A server that listens on all addresses is reached over the loopback address.
    """
    return url.replace("://0.0.0.0:", "://127.0.0.1:", 1).replace("://[::]:", "://[::1]:", 1)


def run_launch(options: LaunchOptions, choose_model: Callable[[], str]) -> int:
    """Run a client and return its exit status. `choose_model` names the model of a server that is started."""
    client, program = CLIENTS[options.client], shutil.which(options.client)
    if program is None:
        raise InvalidRequestError(f"{options.client} is not installed: install {client.title} with {client.install}")
    with ExitStack() as stack:
        if _readiness(options) is None:
            stack.enter_context(_serving(options, options.model or choose_model()))
        else:
            _await_ready(options, "waiting for the server")
        model = _served_model(options)
        context = model.get("max_model_len")
        note(context_remark(context if isinstance(context, int) else _AGENT_CONTEXT))
        environment, arguments = client.settings(page_url(_base(options)), model["id"], options.api_key or "")
        return _run_client([program, *arguments, *options.arguments], os.environ | environment)


def _served_model(options: LaunchOptions) -> Mapping[str, Any]:
    """Return the named model of the server, or its first one. Raises InvalidRequestError if it has none."""
    models = _models(_ask(options, "/v1/models"), options.url)
    for each in models:
        if options.model is None or each["id"] in (options.model, plain_name(options.model)):
            return each
    names = ", ".join(each["id"] for each in models) or "none"
    raise InvalidRequestError(
        f"{options.model or 'a model'} is not served at {options.url}, which serves {names}: "
        "name one of these, or give another --url to start a server there"
    )


def _readiness(options: ServerAddress) -> float | None:
    """Return the loaded share of the server's model, 1.0 if it is ready, or None if no server runs at the URL."""
    url = _base(options) + "/ready"
    try:
        with _opener(url).open(url, timeout=_STATE_SECONDS):
            return 1.0
    except urllib.error.HTTPError as error:
        with suppress(ValueError, TypeError, KeyError):
            return float(json.load(error)["progress"])
        return 1.0  # the next request says what is wrong
    except (OSError, ValueError):
        return None


def _await_ready(options: ServerAddress, message: str, check: Callable[[], None] = lambda: None) -> None:
    """Wait until the server has loaded its model. `check` may raise while the server does not answer."""
    with Spinner(message) as spinner:
        while (share := _readiness(options)) != 1.0:
            check()
            spinner.progress(round(100 * (share or 0)), 100)
            time.sleep(0.1)


@contextmanager
def _serving(options: ServerAddress, model: str) -> Iterator[None]:
    """Run a server of a model at the URL within the context. It is not in the terminal's process group.

    Raises InferError if the URL is not one of this machine, or if the server ends before it is ready.
    """
    address = urllib.parse.urlsplit(_base(options))
    if not _is_local(address.geturl()) or address.scheme != "http":
        _ask(options, "/v1/models")  # which raises, because no server answers
    where = ["--host", str(address.hostname), "--port", str(address.port or 80)]
    command = [sys.executable, "-m", "infer", "serve", "--model", model, *where, "--no-access-log"]
    with tempfile.TemporaryFile() as log:
        server = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=log, start_new_session=True
        )

        def check() -> None:
            if server.poll() is not None:
                log.seek(0)
                reason = log.read().decode(errors="replace").strip().rpartition("\n")[2].removeprefix("infer: ")
                raise InferError(f"the server has ended with status {server.returncode}: {reason}")

        try:
            _await_ready(options, f"loading {model}", check)
            yield
        finally:
            with handling(dict.fromkeys((signal.SIGINT, signal.SIGTERM), lambda number, frame: None)):
                _stop(server)


def _stop(server: subprocess.Popen[bytes]) -> None:
    """End a server: let its answers end, end them after a while, and kill it if that does not help."""
    for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGKILL):
        server.send_signal(number)
        with suppress(subprocess.TimeoutExpired):
            server.wait(_STOP_SECONDS)
            return


def _run_client(command: list[str], environment: Mapping[str, str]) -> int:
    """Run a client in the foreground and return its exit status, 128 + n if signal n ended it.

    The keys of a terminal reach the client itself. Other signals of this process are sent on.
    """
    process: subprocess.Popen[bytes] | None = None
    keys = (signal.SIGINT, signal.SIGQUIT)

    def forward(number: int, frame: FrameType | None) -> None:
        if process is None:
            raise Terminated
        if number not in keys or not sys.stdin.isatty():
            process.send_signal(number)

    with handling(dict.fromkeys((*keys, signal.SIGTERM, signal.SIGHUP), forward)):
        with refusing(f"{command[0]} cannot be started"):
            process = subprocess.Popen(command, env=environment)
        status = process.wait()
    return status if status >= 0 else 128 - status


def run_ps(options: RunningServerOptions) -> None:
    found = _ask(options, "/v1/models")
    rows = [("name", "state", "memory", "context", "takes")]
    rows += () if options.as_json else map(_row, _models(found, options.url))
    print_report(found, columns_of_rows(rows, "<<>><"), as_json=options.as_json)


def run_stop(options: StopOptions) -> None:
    found = _ask(options, "/models/unload", {"model": options.model})
    print_report(found, [f"{options.model} is unloaded"], as_json=options.as_json)


def _models(answer: Any, url: str) -> list[dict[str, Any]]:
    """Return the models of an answer of `/v1/models`. Raises InvalidRequestError for that of another kind of server."""
    match answer:
        case {"data": [*models]} if all(isinstance(each, dict) and isinstance(each.get("id"), str) for each in models):
            return models
    raise InvalidRequestError(f"{url} must list its models as OpenAI's API does, got {json_text(answer):.60}")


def _row(model: Mapping[str, Any]) -> tuple[str, str, str, str, str]:
    """Return the row of a model. Another program's server may give its own kinds of values, which are left out."""
    status = value if isinstance(value := model.get("status"), dict) else {}  # a server of one model gives none
    share = f" {100 * each:.0f} %" if isinstance(each := status.get("progress"), int | float) else ""
    told = f"{status.get('value', 'loaded')}{share}{', pinned' if model.get('is_pinned') is True else ''}"
    memory = megabytes(each, 0) if isinstance(each := model.get("memory_bytes"), int) else ""
    context = f"{each:,}" if isinstance(each := model.get("max_model_len"), int) else ""
    takes = ", ".join(map(str, each)) if isinstance(each := model.get("takes"), list) else ""
    return model["id"], told, memory, context, str(status.get("error") or takes)


def _base(options: ServerAddress) -> str:
    """Return the URL of the server without a path."""
    base = options.url if "://" in options.url else f"http://{options.url}"
    return base.rstrip("/").removesuffix("/v1")


def _ask(options: ServerAddress, path: str, body: Any = None) -> Any:
    """Return the server's answer.

    Raises InferError if there is no server, and InvalidRequestError with the message of a refusal.
    """
    url = _base(options) + path
    headers = {"Content-Type": "application/json"}
    if options.api_key:
        headers["Authorization"] = f"Bearer {options.api_key}"
    try:
        content = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(url, content, headers)
        with _opener(url).open(request, timeout=_SECONDS) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:
        reason = f"status {error.code}"
        with suppress(ValueError, KeyError, TypeError):
            reason = str(json.load(error)["error"]["message"])
        raise InvalidRequestError(f"{options.url} refused the request: {reason}") from error
    except (OSError, ValueError) as error:
        proxy = "" if _is_local(url) else urllib.request.getproxies().get(url.partition(":")[0], "")
        through = f" through the proxy {proxy}" if proxy else ""
        where = f"{options.url}{through} ({getattr(error, 'reason', error)})"
        raise InferError(f"no server answers at {where}: start infer serve, or give --url") from error


def _opener(url: str) -> urllib.request.OpenerDirector:
    """Return an opener that asks no proxy for an address of this machine, which a proxy could not reach."""
    return urllib.request.build_opener(*((urllib.request.ProxyHandler({}),) if _is_local(url) else ()))


def _is_local(url: str) -> bool:
    host = urllib.parse.urlsplit(url).hostname or ""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")
    return address.is_loopback or address.is_unspecified
