"""`infer serve`: the server of a model, or of several that share one memory budget, each in its own process.

This module does not load torch: the thread that loads the model does, or the process of the model. `infer ray deploy`
runs the application of `ray_serve` on the current Ray cluster, or starts one here.
"""

import logging
import os
import socket
import sys
import warnings
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import infer
from infer.cli.commands.server_commands import client_lines, context_remark, page_url
from infer.cli.model_loading import bytes_for_prefixes, check_loading, load_quietly, model_settings, q8_context
from infer.cli.process_streams import cancel_on_signal
from infer.cli.server_options import DeployOptions, ServeOptions
from infer.cli.terminal import experts_remark, q8_remark
from infer.compute.backends.before_load import step_limits
from infer.errors import InvalidRequestError, RequestWarning
from infer.files.hub.find import file_versions
from infer.models.catalog.header_facts import plan_served
from infer.models.catalog.models_at_hand import folder_models, names_at_hand
from infer.serving.distributed.front import run_replicas, run_shelf
from infer.serving.distributed.replica import await_turn
from infer.serving.distributed.shelf import ShelfWork
from infer.serving.distributed.shelved_model import ModelPlan, ModelSource
from infer.serving.server.metrics import LogLines
from infer.serving.server.process import OnProgress, OnReady, bind, check_certificate, run_server, warmed
from infer.serving.server.server_state import ServerState
from infer.serving.server_settings import ServerSettings, read_keys
from infer.system.available_memory import available_memory_bytes
from infer.system.cores import default_num_threads, num_processors, take_cores
from infer.system.spellings import plain_name
from infer.system.status_line import write_notice

OLLAMA_PORT = 11434
_OBJECT_STORE_BYTES = 100 * 2**20  # answers go through Ray's store in small pieces
_RAY_NAME = "infer"
_BUDGET_SHARE = 0.9  # of the available memory: the rest is for the process that clients talk to, and for the system


def run_serve(options: ServeOptions) -> int:
    """Run the server and return its exit status."""
    settings, load = make_settings(options), partial(_load, options)
    begin_logs(options)
    if options.listen_fd is not None:
        if options.replicas > 1 and options.settings.threads is not None:
            take_cores(options.settings.threads)
        if not await_turn():
            return 0
        child = settings.of_child
        listener = socket.socket(fileno=options.listen_fd)
        announce: OnReady = partial(_announce_first, listener, settings)
        if options.served_as is not None:  # one of several models: the process with the clients reports it
            child, announce = replace(child, model=options.served_as, aliases=()), lambda state: None
        return run_server(ServerState(child), listener, load, announce)
    listener = bind(settings)
    port = listener.getsockname()[1]
    write_notice(f"loading {options.model}; {url_of(settings, port)} already answers")
    if options.isolate or options.replicas > 1:
        own = ["--model", options.model]  # so that a replica does not ask for one
        if options.replicas > 1 and options.settings.threads is None:  # each replica gets its share
            own += ["--threads", str(max(1, default_num_threads() // options.replicas))]
        return run_replicas(ServerState(settings), listener, [_command(port, *own)] * options.replicas)
    return run_server(ServerState(settings), listener, load, partial(_announce, settings, port))


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


def _command(port: int, *options: str) -> list[str]:
    """Return the command of a process with a model: that of this process, with further options.

    The number of the descriptor of its socket is appended.
    """
    return [sys.executable, "-m", "infer", *sys.argv[1:], *options, "--port", str(port), "--listen-fd"]


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
    if certificate is None or key is None:
        if certificate is not key:
            raise InvalidRequestError("--tls-cert and --tls-key belong together: give both")
        return
    for path in (certificate, key):
        if not path.is_file():
            raise InvalidRequestError(f"{path} is not a file")
    check_certificate(certificate, key)


def url_of(settings: ServerSettings, port: int) -> str:
    host = f"[{settings.host.strip('[]')}]" if ":" in settings.host else settings.host
    return f"{'https' if settings.tls_cert else 'http'}://{host}:{port}"


def _load(options: ServeOptions, on_progress: OnProgress) -> "infer.AsyncLLM":
    return warmed(load_quietly(options, on_progress))


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
        yield f"memory   {sum(llm.host.runner.cache.pool_pages):,} pages of 64 tokens of keys and values"
        if context := q8_context(llm):
            yield f"q8       {q8_remark(context)}"
        if (experts := llm.host.model.experts) is not None:
            yield f"experts  {experts_remark(experts.memory_bytes, experts.path)}"
        if (draft := llm.host.settings.draft_model) is not None:
            yield f"drafts   {draft}, while they save time"
        elif llm.host.has_draft_head:
            yield "drafts   by the model's own head, while they save time (--no-draft-head)"
        num_bytes = llm.host.settings.prefix_disk or 0
        if (prefixes := llm.host.engine.prefixes) is not None:
            yield f"prefixes {prefixes.folder}, at most {num_bytes / 1e9:g} GB (--prefix-disk)"
    yield f"limits   body {settings.max_body_bytes:,} bytes, {settings.max_connections:,} connections"
    yield f"ends     with SIGTERM or Ctrl-C: answers have {settings.drain_seconds:g} s; a second one ends it now"


def _welcome(settings: ServerSettings, url: str, context: int) -> Iterator[str]:
    """Yield the page's URL and a line per client program, for a person at a terminal."""
    yield ""
    yield f"open {page_url(url)} in a browser, or run one of these:"
    for program, line in client_lines(url, settings.model, has_keys=bool(settings.api_keys)):
        yield f"  {program:<12}{line}"
    if remark := context_remark(context):
        yield f"  ({remark})"


def run_models(options: ServeOptions) -> int:
    """Run a server of several models and return its exit status."""
    _check_shelf(options)
    begin_logs(options)
    logging.getLogger("infer.server").setLevel(logging.INFO)  # it logs models that are loaded and unloaded
    sources = _sources(options)
    settings = make_settings(options)
    if sources:
        settings = replace(settings, model=sources[0].name, aliases=())
    budget = _budget(options)
    share = budget // max(2, len(sources))
    listener = bind(settings)
    port = listener.getsockname()[1]
    work = ShelfWork(
        partial(_plan, options, share),
        lambda source, plan: _command(port, *plan.options, "--model", source.path, "--served-as", source.name),
        partial(_find_models, options),
        lambda source: file_versions(source.path),
    )
    url = url_of(settings, port)
    write_notice(f"url      {url}/v1; the page is {page_url(url)}")
    write_notice(f"models   {', '.join(source.name for source in sources) or 'loaded on demand'}")
    write_notice(f"memory   {budget / 1e9:.1f} GB for all models together")
    return run_shelf(ServerState(replace(settings, memory=budget)), listener, sources, work)


def _check_shelf(options: ServeOptions) -> None:
    """Raise InvalidRequestError for bad options, and for those that belong to a server of one model."""
    check_loading(options)
    alone = {
        "--replicas": options.replicas > 1,
        "--isolate": options.isolate,
        "--tensor-parallel": options.settings.tensor_parallel > 1,
        f"--device {options.settings.device}": options.settings.device != "cpu",
    }
    for name, is_given in alone.items():
        if is_given:
            raise InvalidRequestError(f"{name} is only for a server of one model: leave it out, or name one model")
    if options.served_names and len(options.served_names) != len(options.models):
        raise InvalidRequestError(
            f"--served-model-name must be given once per model, in their order, got {len(options.served_names)} names "
            f"for {len(options.models)} models"
        )
    if options.models_dir is not None and not options.models_dir.is_dir():
        raise InvalidRequestError(f"--models-dir: {options.models_dir} is not a folder")


def _sources(options: ServeOptions) -> list[ModelSource]:
    """Return the models of `--model`, and the pinned ones. Raises InvalidRequestError if two have the same name."""
    names = options.served_names or tuple(_name_of(path) for path in options.models)
    sources = [
        ModelSource(name, path, name in options.pinned) for name, path in zip(names, options.models, strict=True)
    ]
    if twice := [name for name in names if names.count(name) > 1]:
        raise InvalidRequestError(
            f"two models have the name {min(twice)!r}: name each with its own --served-model-name"
        )
    for name in options.pinned:
        if name not in names:
            path_by_name = {source.name: source.path for source in _find_models(options)}
            sources.append(ModelSource(name, path_by_name.get(name, name), is_pinned=True))
    return sources


def _name_of(model: str) -> str:
    """Return the name of a model for clients: its own name, or that of its file or folder."""
    path = Path(model).expanduser()
    return (path.stem if path.suffix == ".gguf" else path.resolve().name) if path.exists() else plain_name(model)


def _find_models(options: ServeOptions) -> list[ModelSource]:
    """Return the models that are loaded on demand and are on this machine now."""
    found = folder_models(options.models_dir) if options.models_dir is not None else ()
    at_hand = names_at_hand() if options.load_on_demand else ()
    return [ModelSource(name.removesuffix(".gguf"), path) for name, path in (*found, *at_hand)]


def _budget(options: ServeOptions) -> int:
    available = available_memory_bytes()
    if options.server.memory is not None:
        return options.server.memory
    if available is None:
        raise InvalidRequestError("the memory of this machine is unknown: set the memory for all models with --memory")
    return int(_BUDGET_SHARE * available)


def _plan(options: ServeOptions, share_bytes: int, source: ModelSource, most_bytes: int) -> ModelPlan:
    """Return the plan of a model, with the options that make its process follow the plan."""
    found = plan_served(source.path, options.settings, most_bytes=most_bytes, share_bytes=share_bytes)
    kept = ["--max-seq-len", str(found.context)]
    if found.cache is not None:
        kept += ["--pool-pages", str(found.cache.pool_pages)]
        if (states := found.cache.settings.state_memory_mb) is not None:
            kept += ["--state-memory-mb", str(states)]
        if options.settings.experts_memory is None and (experts := found.cache.load.experts_memory) is not None:
            kept += ["--experts-memory", str(experts)]
    by_options = {"embed": options.server.allow_embeddings, "rerank": options.settings.reranker != "auto"}
    more = (name for name, is_true in by_options.items() if is_true and name not in found.takes)
    return ModelPlan(found.num_bytes, kept, [*found.takes, *more], found.context)


def run_deploy(options: DeployOptions) -> int:
    """Deploy the application, and return 0 when it serves.

    If a cluster was started for it, return after a signal has ended both.
    """
    import ray
    from ray import serve

    from infer.serving.distributed.ray_serve import Deployed, application

    settings = make_settings(options)
    most = options.max_replicas or options.replicas
    model = model_settings(options)
    threads = model.threads or max(1, num_processors() // most)
    names = ("replicas", "fronts", "max_replicas", "upscale_seconds", "downscale_seconds")
    asked = Deployed(
        load={"model": options.model, **vars(model), "threads": threads},
        settings=settings,
        **{name: getattr(options, name) for name in names},
    )
    is_own = _join(num_cpus=threads * most)
    try:
        port = settings.port
        if is_own:
            with bind(settings) as listener:  # which refuses a port that is taken
                port = listener.getsockname()[1]
        serve.start(http_options={"host": settings.host, "port": port})
        serve.run(application(asked), name=_RAY_NAME, route_prefix="/")
        write_notice(f"{url_of(settings, port)}/v1: at most {most} replicas of {settings.model}")
        if is_own:
            with cancel_on_signal() as cancellation:  # in place of Ray's handlers
                cancellation.event.wait()
            serve.shutdown()
    finally:
        ray.shutdown()
    return 0


def _join(num_cpus: int) -> bool:
    """Join the current cluster, or start one on this machine only, which ends with this process.

    Return True if a cluster was started. Raises InvalidRequestError if there is no cluster at $RAY_ADDRESS.
    """
    import ray

    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # they would be sent to another host
    # The default of 5 s is too short on a busy machine.
    os.environ.setdefault("RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S", "60")
    try:
        ray.init("auto", log_to_driver=False)
    except ConnectionError as error:
        if address := os.environ.get("RAY_ADDRESS"):
            raise InvalidRequestError(
                f"RAY_ADDRESS={address!r:.80}: no cluster there lets us in: start one (ray start --head), set "
                "RAY_AUTH_MODE=token if it asks for the token in ~/.ray/auth_token, or unset RAY_ADDRESS"
            ) from error
        ray.init(
            num_cpus=num_cpus, include_dashboard=False, object_store_memory=_OBJECT_STORE_BYTES, log_to_driver=False
        )
        return True
    return False
