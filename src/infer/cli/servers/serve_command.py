"""`infer serve`: the server of a model. This module does not load torch: the thread that loads the model does."""

import json
import logging
import shlex
import socket
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import infer
from infer.cli.options.model_loading import bytes_for_prefixes
from infer.cli.options.server_options import DeployOptions, ServeOptions
from infer.compute.backends.before_load import step_limits
from infer.errors import InvalidRequestError, RequestWarning
from infer.serving.distributed.front import run_replicas
from infer.serving.distributed.replica import await_turn
from infer.serving.server.access_log import LogLines
from infer.serving.server.auth import read_keys
from infer.serving.server.process import OnProgress, OnReady, bind, check_certificate, run_server, warmed
from infer.serving.server.server_state import ServerState
from infer.serving.server_settings import ServerSettings
from infer.system.cores.cores import default_num_threads, take_cores
from infer.system.spellings import plain_name
from infer.system.status_line import write_notice

Load = Callable[[OnProgress], "infer.LLM"]
OLLAMA_PORT = 11434
NO_KEY, KEY = "none", "YOUR_KEY"  # clients need a key even if the server needs none
# Tokens that coding agents send, and the context that they need.
_AGENT_PROMPT, _AGENT_CONTEXT = "10,000 to 25,000", 32_768


def run_serve(options: ServeOptions, load: Load) -> int:
    """Run the server and return its exit status."""
    settings = make_settings(options)
    begin_logs(options)
    if options.listen_fd is not None:
        if options.replicas > 1 and options.settings.threads is not None:
            take_cores(options.settings.threads)
        if not await_turn():
            return 0
        own = settings.of_child
        listener = socket.socket(fileno=options.listen_fd)
        announce: OnReady = partial(_announce_first, listener, settings)
        if options.served_as is not None:  # one of several models: the process with the clients reports it
            own, announce = replace(own, model=options.served_as, aliases=()), lambda state: None
        return run_server(ServerState(own), listener, partial(_load, load), announce)
    listener = bind(settings)
    port = listener.getsockname()[1]
    write_notice(f"loading {options.model}; {url_of(settings, port)} already answers")
    if options.isolate or options.replicas > 1:
        commands = _commands(options.model, options.replicas, port, has_threads=options.settings.threads is not None)
        return run_replicas(ServerState(settings), listener, commands)
    return run_server(ServerState(settings), listener, partial(_load, load), partial(_announce, settings, port))


def begin_logs(options: ServeOptions) -> None:
    """Write the server's log to stderr, and its access log to stdout unless the options say otherwise."""
    warnings.simplefilter("ignore", RequestWarning)  # they repeat what a request reports
    if sys.stderr is not None:
        logging.getLogger().addHandler(LogLines(sys.stderr))  # also the lines of uvicorn and asyncio
    if options.verbose:
        logging.getLogger("infer.server").setLevel(logging.DEBUG)
    log = logging.getLogger("infer.access")
    log.propagate = False
    if not options.no_access_log and sys.stdout is not None:
        log.setLevel(logging.INFO)
        log.addHandler(LogLines(sys.stdout))


def _commands(model: str, num_replicas: int, port: int, *, has_threads: bool) -> list[list[str]]:
    """Return the command of each replica. It names the model, so that a replica does not ask for one.

    Each replica gets its share of the threads, unless their number is given.
    """
    command = [sys.executable, "-m", "infer", *sys.argv[1:], "--model", model, "--port", str(port)]
    if num_replicas > 1 and not has_threads:
        command += ["--threads", str(max(1, default_num_threads() // num_replicas))]
    return [[*command, "--listen-fd"]] * num_replicas


def make_settings(options: ServeOptions | DeployOptions) -> ServerSettings:
    """Return the server's settings.

    Raises InvalidRequestError for options that contradict each other, and for files that cannot be read.
    """
    if isinstance(options, ServeOptions):
        _check_tls(options.server.tls_cert, options.server.tls_key)
        bytes_for_prefixes(options)
    is_ollama = isinstance(options, ServeOptions) and options.ollama
    port = options.port if options.port is not None else OLLAMA_PORT if is_ollama else ServerSettings.port
    keys = read_keys(options.api_key_file) if options.api_key_file else {}
    model, *aliases = options.served_names or [plain_name(options.model)]
    settings = replace(options.server, model=model, aliases=tuple(aliases), model_path=options.model)
    if isinstance(options, DeployOptions):
        settings = replace(settings, drain_seconds=options.drain_seconds)
    return replace(settings, port=port, api_keys=keys, max_slots=step_limits(options.settings.device).logits)


def _check_tls(certificate: Path | None, key: Path | None) -> None:
    if certificate is None and key is None:
        return
    if certificate is None or key is None:
        raise InvalidRequestError("--tls-cert and --tls-key belong together: give both")
    for path in (certificate, key):
        if not path.is_file():
            raise InvalidRequestError(f"{path} is not a file")
    check_certificate(certificate, key)


def url_of(settings: ServerSettings, port: int) -> str:
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    return f"{'https' if settings.tls_cert else 'http'}://{host}:{port}"


def _load(load: Load, on_progress: OnProgress) -> "infer.AsyncLLM":
    return warmed(load(on_progress))


def _announce_first(listener: socket.socket, settings: ServerSettings, state: ServerState) -> None:
    """Announce the server once: the first replica that is ready leaves a mark in the folder of the sockets."""
    with suppress(FileExistsError):
        (Path(listener.getsockname()).parent / "announced").touch(exist_ok=False)
        _announce(settings, settings.port, state)


def _announce(settings: ServerSettings, port: int, state: ServerState) -> None:
    """Announce the server. `settings` are those that clients see, even if a child process has the model."""
    llm, url = state.llm().llm, url_of(settings, port)
    for line in _lines(llm, settings, url):
        write_notice(line)
    if sys.stderr.isatty():
        for line in _welcome(settings, url, llm.max_seq_len):
            write_notice(line)


def _lines(llm: "infer.LLM", settings: ServerSettings, url: str) -> Iterator[str]:
    """Yield lines about the URL, the model, the slots, the memory and the limits."""
    keys = f"{len(settings.api_keys)} keys" if settings.api_keys else "no key needed"
    yield f"url      {url}/v1 ({keys})"
    yield f"model    {settings.model}: {llm!r}"
    yield f"slots    {settings.slots}; {settings.max_queue} may wait, at most {settings.max_ttft:g} s for a first token"
    if not llm.architecture.reads_whole_texts:
        yield f"memory   {sum(llm._opened.runner.pool_pages):,} pages of 64 tokens of keys and values"
        num_bytes = llm._opened.settings.prefix_disk or 0
        if (prefixes := llm._opened.engine.prefixes) is not None:
            yield f"prefixes {prefixes.folder}, at most {num_bytes / 1e9:g} GB (--prefix-disk)"
    yield f"limits   body {settings.max_body_bytes:,} bytes, {settings.max_connections:,} connections"
    yield f"ends     with SIGTERM or Ctrl-C: answers have {settings.drain_seconds:g} s; a second one ends it now"


def _welcome(settings: ServerSettings, url: str, context: int) -> Iterator[str]:
    """Yield the page's URL and a line per client program, for a person at a terminal."""
    yield ""
    yield f"open {page_url(url)} in a browser, or run one of these:"
    for program, line in client_lines(url, settings.model, has_keys=bool(settings.api_keys)):
        yield f"  {program:<12}{line}"
    if context < _AGENT_CONTEXT:
        yield f"  (Claude Code and Codex send {_AGENT_PROMPT} tokens with a question; this context holds {context:,})"


def page_url(url: str) -> str:
    """Return the URL for a browser on this machine.

    A server that listens on all addresses is reached over the loopback address.
    """
    return url.replace("://0.0.0.0:", "://127.0.0.1:", 1).replace("://[::]:", "://[::1]:", 1)


def client_lines(url: str, model: str, *, has_keys: bool) -> Iterator[tuple[str, str]]:
    """Yield the name and the line of each client program. `url` has no path.

    Claude Code, Codex and Open WebUI are shell commands; Continue's line belongs in its config.yaml.
    """
    key = KEY if has_keys else NO_KEY
    base, name = page_url(url), shlex.quote(model)
    yield (
        "Claude Code",
        f"ANTHROPIC_BASE_URL={base} ANTHROPIC_AUTH_TOKEN={key} ANTHROPIC_MODEL={name} "
        f"ANTHROPIC_DEFAULT_HAIKU_MODEL={name} claude",
    )
    env_key = ', env_key="INFER_API_KEY"' if has_keys else ""
    provider = f'{{name="infer", base_url="{base}/v1", wire_api="responses"{env_key}}}'
    given = f"INFER_API_KEY={key} " if has_keys else ""
    yield "Codex", f"{given}codex -c model_provider=infer -c 'model_providers.infer={provider}' -m {name}"
    values = {"name": model, "provider": "openai", "model": model, "apiBase": f"{base}/v1", "apiKey": key}
    yield "Continue", f"models: [{json.dumps(values, ensure_ascii=False)}]"
    yield "Open WebUI", f"OPENAI_API_BASE_URL={base}/v1 OPENAI_API_KEY={key} open-webui serve"
