"""Settings of a model that ranks share: its source, its devices, and the settings that the ranks start with."""

from pathlib import Path
from typing import Literal, NamedTuple, final

from infer.compute.kvcache.cache_settings import CacheSettings
from infer.errors import InvalidRequestError

Transport = Literal["memory", "gloo", "nccl"]


@final
class ModelSource(NamedTuple):
    """Source of a model, and how it is loaded, under the names that `LLM` uses."""

    path: Path
    fingerprint: str  # fingerprint of the model's files, which must be the same for all ranks
    dtype: str
    weights: str
    precision: str
    num_threads: int  # threads of each rank
    devices: tuple[str, ...] = ()  # one device per rank; (): all ranks are on the CPU

    def device_of(self, rank: int) -> str:
        return self.devices[rank] if self.devices else "cpu"


@final
class RunnerSettings(NamedTuple):
    """Arguments of `Runner`, by name, which are the same for all ranks."""

    capacity: int
    settings: CacheSettings
    num_slots: int
    pool_pages: int | None
    capture: bool
    step_tokens: int | None = None


def rank_devices(device: str, num_ranks: int) -> tuple[str, ...]:
    """Return the device of each rank. A list of GPUs, such as "cuda:0,1", has a rank for each.

    Raises InvalidRequestError if the list, or its length, is wrong.
    """
    kind, _, listed = device.partition(":")
    indices = listed.split(",")
    if kind != "cuda" or len(indices) == 1:
        if num_ranks > 1 and device != "cpu":
            raise InvalidRequestError(
                f"tensor_parallel={num_ranks} needs device cpu or a list of GPUs such as cuda:0,1, got {device!r:.80}"
            )
        return (device,) * num_ranks
    if not all(index.isdecimal() and index.isascii() for index in indices):
        raise InvalidRequestError(f"device must list GPUs by number, as in cuda:0,1, got {device!r:.80}")
    devices = tuple(f"cuda:{int(index)}" for index in indices)
    if twice := [name for place, name in enumerate(devices) if name in devices[:place]]:
        raise InvalidRequestError(f"device {device:.80} names {twice[0]} twice: name each GPU once")
    if num_ranks not in (1, len(devices)):
        raise InvalidRequestError(
            f"tensor_parallel={num_ranks} and device {device:.80} contradict each other: leave tensor_parallel out, "
            "each GPU has a process"
        )
    return devices


def check_shared(num_ranks: int, cache: CacheSettings) -> None:
    """Raise InvalidRequestError if ranks cannot share a model with such a cache."""
    if cache.memory_threshold_mb is not None:
        raise InvalidRequestError(
            f"memory_threshold_mb={cache.memory_threshold_mb}: the ranks of tensor_parallel={num_ranks} would evict "
            "at different moments; leave it out to evict from the start"
        )
