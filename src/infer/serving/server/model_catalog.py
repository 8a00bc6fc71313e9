"""Models on this machine and on the hub, for routes that describe and download them.

The modules that read headers load numpy and tokenizers. They are imported when a route first needs them, so that the
port answers before that.
"""

import asyncio
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

from infer.errors import InferError
from infer.models.catalog.model_facts import ModelFacts

Report = Callable[[int, int], None]  # bytes: done, and in total


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
