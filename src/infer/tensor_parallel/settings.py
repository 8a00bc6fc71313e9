"""What a model is shared out as, and what its ranks are told to begin with."""

from pathlib import Path
from typing import Literal, NamedTuple, final

from infer.errors import InvalidRequestError
from infer.kvcache.settings import CacheSettings

Transport = Literal["memory", "gloo"]


@final
class ModelSource(NamedTuple):
    """Where a model is loaded from, and how: in the words of `LLM`."""

    path: Path
    fingerprint: str  # of its files, which all ranks must find the same
    dtype: str
    weights: str
    precision: str
    num_threads: int  # of each rank


@final
class RunnerSettings(NamedTuple):
    """Of rank 0's runner: all store alike."""

    max_seq_len: int
    cache: CacheSettings
    num_slots: int
    pool_pages: int | None
    capture: bool


def check_shared(num_ranks: int, device: str, cache: CacheSettings) -> None:
    """Raises InvalidRequestError where a model cannot be shared out among so many ranks."""
    if device != "cpu":
        raise InvalidRequestError(f"tensor_parallel={num_ranks} shares a model out on a CPU, got device {device!r:.80}")
    if cache.memory_threshold_mb is not None:
        raise InvalidRequestError(
            f"memory_threshold_mb={cache.memory_threshold_mb}: the ranks of tensor_parallel={num_ranks} would forget "
            "at different moments; leave it out to evict from the start"
        )
