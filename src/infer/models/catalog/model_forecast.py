"""Forecast the memory of a model on this machine and the speed of its answers, from its headers only."""

from collections.abc import Mapping
from dataclasses import dataclass

from infer.compute.kvcache.cache_settings import CacheSettings
from infer.compute.operands.architecture import Architecture
from infer.models.memory.memory_budget import MemoryBudget, context_length
from infer.models.memory.memory_estimate import LoadSettings, StoredMatrix, decode_bytes, loaded_types
from infer.system.available_memory import read_bandwidth
from infer.system.cores import default_num_threads

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
