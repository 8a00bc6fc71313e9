"""Ollama's descriptions of models: in lists, with their headers, and while they are loaded."""

from typing import Any, NamedTuple

from msgspec import UNSET, Struct, UnsetType

from infer.models.catalog.model_facts import ModelFacts
from infer.sampling_params import PARAMETERS
from infer.serving.server.answer_types import Count, Json
from infer.serving.server.ollama_events import time_text

_FILLS_IN = "{# .Suffix #}"  # a comment: Continue searches for this word to learn if the model can fill in text
FOREVER = "9999-12-31T23:59:59Z"  # the end of a model that is never unloaded for being idle


class OllamaDetails(Struct):
    parent_model: str
    format: str
    family: str
    families: list[str]
    parameter_size: str
    quantization_level: str


class OllamaModel(Struct):
    """A model of a list. The last three fields belong to a loaded model; no model has memory of a GPU."""

    name: str
    model: str
    modified_at: str
    size: Count
    digest: str
    details: OllamaDetails
    size_vram: Count | UnsetType = UNSET
    context_length: Count | UnsetType = UNSET
    expires_at: str | UnsetType = UNSET


class OllamaModels(Struct):
    models: list[OllamaModel]


class ShownModel(Struct):
    """The headers of a model. `template` is in Jinja, and `parameters` are the model's own defaults."""

    license: str
    modelfile: str
    parameters: str
    template: str
    details: OllamaDetails
    model_info: Json
    capabilities: list[str]
    modified_at: str


class LoadedModel(NamedTuple):
    """Facts about a loaded model: its memory in bytes, the tokens of its context, and when it is unloaded if idle."""

    num_bytes: int
    context: int | None
    expires_at: str = FOREVER


def tagged(name: str) -> str:
    """Return the name as Ollama's clients expect it, with a tag."""
    return name if ":" in name else f"{name}:latest"


def listed(name: str, facts: ModelFacts | None, loaded: LoadedModel | None = None) -> OllamaModel:
    """Return the entry of a model. The facts are None if its headers cannot be read."""
    found = OllamaModel(
        name=tagged(name),
        model=tagged(name),
        modified_at=time_text(0.0 if facts is None else facts.modified_at),
        size=0 if facts is None else facts.num_bytes,
        digest="" if facts is None else facts.digest,
        details=_details(facts),
    )
    if loaded is not None:
        found.size, found.size_vram, found.expires_at = loaded.num_bytes, 0, loaded.expires_at
        found.context_length = UNSET if loaded.context is None else loaded.context
    return found


def shown(name: str, facts: ModelFacts, context: int | None) -> ShownModel:
    """Return the description of a model. `context` is the length that is served, if it is known."""
    info: dict[str, Any] = {
        "general.architecture": facts.family,
        "general.parameter_count": facts.num_parameters,
        f"{facts.family}.context_length": context or facts.context,
        f"{facts.family}.embedding_length": facts.embedding_size,
    }
    parameters = {"num_ctx": context or facts.context} | {
        next(iter(PARAMETERS[own].other_names), own): value for own, value in facts.sampling.items()
    }
    return ShownModel(
        license="",
        modelfile=f"FROM {name}\n",
        parameters="\n".join(f"{parameter:<30} {value}" for parameter, value in parameters.items()),
        template=facts.template + (_FILLS_IN if "insert" in facts.abilities else ""),
        details=_details(facts),
        model_info=info,
        capabilities=list(facts.abilities),
        modified_at=time_text(facts.modified_at),
    )


def _details(facts: ModelFacts | None) -> OllamaDetails:
    if facts is None:
        return OllamaDetails("", "", "", [], "", "")
    family, size = facts.family, facts.parameter_size
    return OllamaDetails("", facts.file_format, family, [family], size, facts.weights)
