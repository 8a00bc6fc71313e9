"""Settings of a model that ranks share: its source, and the settings that the ranks start with."""

from pathlib import Path
from typing import Literal, NamedTuple, final

from infer.errors import InvalidRequestError
from infer.kvcache.cache_settings import CacheSettings

Transport = Literal["memory", "gloo"]


@final
class ModelSource(NamedTuple):
    """Source of a model, and how it is loaded, under the names that `LLM` uses."""

    path: Path
    fingerprint: str  # of its files, which all ranks must find the same
    dtype: str
    weights: str
    precision: str
    num_threads: int  # of each rank


@final
class RunnerSettings(NamedTuple):
    """Arguments of `Runner`, by name, which are the same for all ranks."""

    capacity: int
    settings: CacheSettings
    num_slots: int
    pool_pages: int | None
    capture: bool


def check_shared(num_ranks: int, device: str, cache: CacheSettings) -> None:
    """Raise InvalidRequestError if a model cannot be shared out among `num_ranks` ranks."""
    if device != "cpu":
        raise InvalidRequestError(f"tensor_parallel={num_ranks} needs device cpu, got {device!r:.80}")
    if cache.memory_threshold_mb is not None:
        raise InvalidRequestError(
            f"memory_threshold_mb={cache.memory_threshold_mb}: the ranks of tensor_parallel={num_ranks} would evict "
            "at different moments; leave it out to evict from the start"
        )
