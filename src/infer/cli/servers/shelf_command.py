"""`infer serve` with several models: each has its own process, which is loaded on demand within one memory budget."""

import logging
import sys
from collections.abc import Hashable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from infer.cli.options.option_checks import check_loading
from infer.cli.options.server_options import ServeOptions
from infer.cli.servers.serve_command import begin_logs, make_settings, page_url, url_of
from infer.errors import InvalidRequestError
from infer.files.hub.file_versions import file_versions
from infer.models.catalog.models_at_hand import folder_models, names_at_hand
from infer.models.catalog.served_plan import plan_served
from infer.serving.distributed.shelf import ShelfWork
from infer.serving.distributed.shelf_front import run_shelf
from infer.serving.distributed.shelved_model import ModelPlan, ModelSource
from infer.serving.server.process import bind
from infer.serving.server.server_state import ServerState
from infer.system.memory.available_memory import available_memory_bytes
from infer.system.spellings import plain_name
from infer.system.status_line import write_notice

_BUDGET_SHARE = 0.9  # of the available memory: the rest is for the process that clients talk to, and for the system


def run_models(options: ServeOptions) -> int:
    """Run a server of several models and return its exit status."""
    _check(options)
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
        partial(_plan, options, share), partial(_command, options, port), partial(_find, options), _version
    )
    url = url_of(settings, port)
    write_notice(f"url      {url}/v1; the page is {page_url(url)}")
    write_notice(f"models   {', '.join(source.name for source in sources) or 'loaded on demand'}")
    write_notice(f"memory   {budget / 1e9:.1f} GB for all models together")
    return run_shelf(ServerState(replace(settings, memory=budget)), listener, sources, work)


def _check(options: ServeOptions) -> None:
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
    names = options.served_names or [_name_of(path) for path in options.models]
    sources = [
        ModelSource(name, path, name in options.pinned) for name, path in zip(names, options.models, strict=True)
    ]
    if twice := {source.name for source in sources if [each.name for each in sources].count(source.name) > 1}:
        raise InvalidRequestError(
            f"two models have the name {min(twice)!r}: name each with its own --served-model-name"
        )
    known = {source.name for source in sources}
    for name in options.pinned:
        if name not in known:
            found = {source.name: source for source in _find(options)}
            path = found[name].path if name in found else name
            sources.append(ModelSource(name, path, is_pinned=True))
    return sources


def _name_of(model: str) -> str:
    """Return the name of a model for clients: its own name, or that of its file or folder."""
    path = Path(model).expanduser()
    return (path.stem if path.suffix == ".gguf" else path.resolve().name) if path.exists() else plain_name(model)


def _find(options: ServeOptions) -> list[ModelSource]:
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


def _version(source: ModelSource) -> Hashable:
    return file_versions(source.path)


def _plan(options: ServeOptions, share_bytes: int, source: ModelSource, most_bytes: int) -> ModelPlan:
    """Return the plan of a model, with the options that make its process follow the plan."""
    found = plan_served(source.path, options.settings, most_bytes=most_bytes, share_bytes=share_bytes)
    kept = ["--max-seq-len", str(found.context)]
    if found.cache is not None:
        kept += ["--pool-pages", str(found.cache.pool_pages)]
        if (states := found.cache.settings.state_memory_mb) is not None:
            kept += ["--state-memory-mb", str(states)]
    return ModelPlan(found.num_bytes, kept, _takes(options, found.takes), found.context)


def _takes(options: ServeOptions, tasks: Sequence[str]) -> Sequence[str]:
    """Return the tasks that a model can do, according to its files and to the options for all models."""
    by_options = {"embed": options.server.allow_embeddings, "rerank": options.settings.reranker != "auto"}
    return [*tasks, *(name for name, is_true in by_options.items() if is_true and name not in tasks)]


def _command(options: ServeOptions, port: int, source: ModelSource, plan: ModelPlan) -> Sequence[str]:
    """Return the command of a model's process: the command of this process, with the model last."""
    command = [sys.executable, "-m", "infer", *sys.argv[1:], *plan.options, "--port", str(port)]
    return [*command, "--model", source.path, "--served-as", source.name, "--listen-fd"]
