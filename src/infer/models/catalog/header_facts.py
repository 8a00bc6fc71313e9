"""Facts of a model's headers: its tasks, the speed of its answers, and the memory that it takes. Loads no torch."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Literal, NamedTuple

from infer.compute.kvcache.cache_settings import CacheSettings
from infer.compute.kvcache.groups import check_layers
from infer.compute.operands.architecture import Architecture
from infer.errors import ModelError
from infer.files import Checkpoint, open_checkpoint, resolve
from infer.files.generation_config import defaults_of
from infer.files.hub.find import file_versions
from infer.model_settings import ModelSettings
from infer.models.catalog.model_facts import ModelFacts
from infer.models.catalog.models_at_hand import weights_name
from infer.models.draft_plan import plan_draft_bytes
from infer.models.families import make_architecture, open_network
from infer.models.memory.memory_budget import MemoryBudget, context_length
from infer.models.memory.memory_estimate import LoadSettings, StoredMatrix, decode_bytes, loaded_types, weights_by_type
from infer.system.available_memory import read_bandwidth
from infer.system.cores import default_num_threads
from infer.text.tokenizer.infill import find_marks
from infer.text.tokenizer.tokenizer_files import read_template, read_token_names
from infer.text.toolcalls.answer_format import reasoning_of

Task = Literal["embed", "rerank", "classify"]


def tasks_of(checkpoint: Checkpoint, *, is_encoder: bool) -> tuple[Task, ...]:
    """Return the tasks of a model. A decoder without any of these heads has none, because it generates."""
    found: dict[Task, bool] = {
        "embed": checkpoint.embedding is not None or (is_encoder and checkpoint.classifier is None),
        "rerank": checkpoint.reranker is not None,
        "classify": checkpoint.classifier is not None and len(checkpoint.classifier.labels) > 1,
    }
    return tuple(task for task, is_true in found.items() if is_true)


_MOST_MODELS = 256  # most models whose facts are cached


def read_facts(model: str) -> ModelFacts:
    """Return the facts about a model, the value of `--model`. Raises the errors of opening it."""
    return _facts(resolve(model), file_versions(model))


@lru_cache(_MOST_MODELS)
def _facts(path: Path, versions: tuple[object, ...]) -> ModelFacts:
    """Read the facts. `versions` only distinguishes files with the same path."""
    checkpoint = open_checkpoint(path)
    architecture = make_architecture(checkpoint.config)
    is_encoder = architecture.reads_whole_texts
    template = "" if is_encoder else read_template(checkpoint.path, checkpoint.metadata) or ""
    known = read_token_names(checkpoint.path, checkpoint.metadata)
    abilities = {
        "completion": not is_encoder,
        "tools": bool(template),  # a template without tools gets a prompt of ours
        "insert": find_marks(lambda names: {name: 0 for name in names if name in known}) is not None,
        "thinking": reasoning_of(template) is not None,
        "embedding": "embed" in tasks_of(checkpoint, is_encoder=is_encoder),
    }
    return ModelFacts(
        file_format="safetensors" if checkpoint.path.is_dir() else "gguf",
        family=str(checkpoint.config.get("model_type")),
        num_parameters=sum(each.num_values for each in weights_by_type(checkpoint.tensors)),
        weights=weights_name(checkpoint.metadata, checkpoint.tensors),
        num_bytes=sum(file.size for file in checkpoint.files),
        modified_at=max((file.path.stat().st_mtime for file in checkpoint.files), default=0.0),
        digest=hashlib.sha256(checkpoint.fingerprint().encode()).hexdigest(),
        context=architecture.own_length,
        embedding_size=architecture.hidden_size,
        template=template,
        sampling=dict(defaults_of(checkpoint)),
        abilities=tuple(name for name, is_true in abilities.items() if is_true),
    )


# Share of the memory's speed that decode reaches: `infer bench` measured 0.72 to 0.76 on two cores of a Zen 3.
BANDWIDTH_SHARE = 0.75
FORECAST_CONTEXT = 512  # tokens before the decoded ones


@dataclass(frozen=True)
class ModelForecast:
    """Memory of the whole process with a default context, and tokens per second of one answer on the CPU."""

    memory_bytes: int
    tokens_per_second: float


def forecast(architecture: Architecture, tensors: Mapping[str, StoredMatrix]) -> ModelForecast:
    """Return the forecast of a model that is loaded with the default settings."""
    load, cache = LoadSettings(num_threads=default_num_threads()), CacheSettings()
    context = context_length(None, architecture, cache)
    needed = MemoryBudget.of(architecture, tensors, load, cache, num_tokens=context)
    return ModelForecast(needed.total, tokens_per_second(architecture, tensors, load, load.kv_type))


def tokens_per_second(
    architecture: Architecture, tensors: Mapping[str, StoredMatrix], load: LoadSettings, kv_type: str
) -> float:
    """Return the predicted decode rate of one row: the memory's speed divided by the bytes that a step reads."""
    num_bytes = decode_bytes(architecture, loaded_types(architecture, tensors, load), kv_type, FORECAST_CONTEXT)
    return BANDWIDTH_SHARE * read_bandwidth(load.num_threads) / num_bytes


class ServedPlan(NamedTuple):
    """Total memory in bytes of the process, tokens of a context, the cache (None: an encoder has none), and tasks."""

    num_bytes: int
    context: int
    cache: MemoryBudget | None
    takes: tuple[str, ...]


def plan_served(model: str, settings: ModelSettings, *, most_bytes: int, share_bytes: int) -> ServedPlan:
    """Return the plan of a model that takes at most `most_bytes`.

    The cache has the settings' `pool_pages` pages. If that is None, it has pages for as many full contexts as fit in
    `share_bytes`, from 1 to 8. Experts that do not fit are read from a file. Raises ModelError, which names the context
    that would fit, if one context is too large.
    """
    checkpoint, architecture = open_network(model)
    load, cache = LoadSettings.of(settings, settings.threads or default_num_threads()), settings.cache
    pool_pages = settings.pool_pages
    check_layers(cache, architecture.mixers)
    context = context_length(settings.max_seq_len, architecture, cache)
    headers = architecture, checkpoint.tensors, load, cache
    least = MemoryBudget.of(*headers, num_tokens=context, pool_pages=pool_pages)
    found = least if architecture.reads_whole_texts else least.planned(share_bytes)
    draft_bytes = plan_draft_bytes(settings, checkpoint, context, load)
    most_bytes -= draft_bytes
    if settings.tensor_parallel == 1:
        found = found.with_experts_that_fit(max(0, most_bytes - found.process))
    if found.total > most_bytes:
        beside = found.total - least.model
        try:
            least.check(checkpoint.path.name, max(0, most_bytes - beside))
        except ModelError as error:
            allowed, taken = (most_bytes + draft_bytes) // 1_000_000, (beside + draft_bytes) // 1_000_000
            raise ModelError(
                f"{error}; {allowed:,} MB are allowed, and the process takes {taken:,} MB of them"
            ) from error
    tasks = tasks_of(checkpoint, is_encoder=architecture.reads_whole_texts)
    plan = None if architecture.reads_whole_texts else found
    return ServedPlan(found.total + draft_bytes, context, plan, tasks or ("generate",))
