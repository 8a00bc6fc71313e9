"""`/v1/models`: the served model, under each of its names, and models on this machine and on the hub.

`distributed.front` shows several models. The modules that read headers load numpy and tokenizers. They are
imported when a route first needs them, so that the port answers before that.
"""

import asyncio
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Literal

from msgspec import UNSET, Struct, UnsetType, field

from infer.errors import InferError
from infer.models.catalog.model_facts import ModelFacts
from infer.serving.protocols.events import Count
from infer.serving.server.endpoint import ApiRequest, get
from infer.serving.server.server_state import ServerState

StatusValue = Literal["unloaded", "loading", "loaded", "unloading", "failed"]
Report = Callable[[int, int], None]  # bytes: done, and in total


class ModelStatus(Struct, omit_defaults=True):
    """The state of a model, if the server has several. `progress` is the loaded share of a model that is loading."""

    value: StatusValue
    progress: float | None = None
    error: str | None = None


class ServedModel(Struct, kw_only=True):
    """A name of a model. The context length is known after the model's headers were read.

    A server of several models shows their state, their tasks, and the memory that each uses or would use.
    """

    id: str
    object: Literal["model"]
    created: Count
    owned_by: str
    root: str
    parent: None
    max_model_len: Count | UnsetType = UNSET  # vLLM's name
    context_length: Count | UnsetType = UNSET  # OpenRouter's name
    status: ModelStatus | UnsetType = UNSET  # llama.cpp's name
    takes: list[str] | UnsetType = UNSET
    capabilities: list[str] | UnsetType = UNSET  # Ollama's names
    input_modalities: list[str] = field(default_factory=lambda: ["text"])  # OpenRouter's name
    memory_bytes: Count | UnsetType = UNSET
    is_pinned: bool | UnsetType = UNSET


class ServedModels(Struct, tag_field="object", tag="list"):
    """The models. A server of several models also shows if clients may download others."""

    data: list[ServedModel]
    allow_pull: bool | UnsetType = UNSET


async def list_models(request: ApiRequest) -> ServedModels:
    return ServedModels([await _model(request.server, name) for name in request.server.names])


async def get_model(request: ApiRequest) -> ServedModel:
    name = request.path_params["id"]
    request.check_model(name)
    return await _model(request.server, name)


async def _model(state: ServerState, name: str) -> ServedModel:
    settings, loaded = state.settings, state.loaded
    if loaded is None:  # headers are not read while the model is loading
        return served_model(state, name, settings.model)
    context = loaded.host.model.max_seq_len
    return served_model(state, name, settings.model, context, await facts_of(settings.model_path))


def served_model(
    state: ServerState, name: str, root: str, context: int | None = None, facts: ModelFacts | None = None
) -> ServedModel:
    """Return the entry of a model. `root` is its first name. Its context, in tokens, and its facts may be unknown."""
    length = UNSET if context is None else context
    return ServedModel(
        id=name,
        object="model",
        created=int(state.started_at),
        owned_by="infer",
        root=root,
        parent=None,
        max_model_len=length,
        context_length=length,
        capabilities=UNSET if facts is None else list(facts.abilities),
    )


async def facts_of(model: str) -> ModelFacts | None:
    """Return the facts about a model, the value of `--model`, or None if its headers cannot be read."""

    def read() -> ModelFacts:
        found: ModelFacts = import_module("infer.models.catalog.header_facts").read_facts(model)
        return found

    try:
        return await asyncio.to_thread(read)
    except InferError:
        return None


def is_at_hand(name: str) -> bool:
    """Return True if `infer models` lists the name, or a GGUF file with this name."""
    names: set[str] = {each for each, _ in import_module("infer.models.catalog.models_at_hand").names_at_hand()}
    return not names.isdisjoint((name, f"{name}.gguf"))


def cached_path(name: str) -> str | None:
    """Return the path of a model in the local cache of the hub, or None if it is not there."""
    hub = import_module("infer.files.hub.hub")
    parsed = hub.parse_hub_name(name)
    path = None if parsed is None else hub.find_cached(parsed)
    return None if path is None else str(path)


def fetch(repository: str, report: Report) -> Path:
    """Return the place of a model on the hub, after it was downloaded. Raises InferError."""
    hub, download = import_module("infer.files.hub.hub"), import_module("infer.files.hub.hub_download")
    found: Path = download.fetch(hub.parse_hub_name(repository), report)
    return found


def is_fetched(repository: str) -> bool | None:
    """Return True if the local cache of the hub has the model, or None if this cannot be a name on the hub."""
    hub = import_module("infer.files.hub.hub")
    name = hub.parse_hub_name(repository)
    return None if name is None else hub.find_cached(name) is not None


ROUTES = [
    get("/v1/models", list_models, "List the served models, under each of their names", answer=ServedModels),
    get("/v1/models/{id:path}", get_model, "Show a served model", answer=ServedModel),
]
