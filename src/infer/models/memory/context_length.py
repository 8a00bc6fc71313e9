"""The number of tokens in a context, and in a step: requested and checked, or the most that model and memory allow.

Arithmetic on headers: loads no torch and allocates nothing.
"""

from collections.abc import Mapping
from dataclasses import replace

from infer.compute.kvcache.cache_settings import CacheSettings
from infer.compute.operands.architecture import Architecture
from infer.compute.operands.limits import HOST_STEP
from infer.errors import InvalidRequestError
from infer.files.tensors.tensor_info import TensorInfo
from infer.models.memory.memory_estimate import LoadSettings, estimate, largest_context
from infer.request_limits import MAX_CONTEXT

_LEAST, _MULTIPLE = 512, 64  # smallest context that is cut to the memory, and its unit
_WORKSPACE_SHARE = 8  # a step's buffers may take an eighth of the memory


def context_length(max_seq_len: int | None, architecture: Architecture, cache: CacheSettings) -> int:
    """Return `max_seq_len`. If it is None, return the model's own length, but at most the default.

    Raises InvalidRequestError if `max_seq_len` is not valid for the model.
    """
    if max_seq_len is None:
        return min(architecture.own_length, MAX_CONTEXT)
    if isinstance(max_seq_len, bool) or not isinstance(max_seq_len, int) or max_seq_len < 2:
        raise InvalidRequestError(
            f"max_seq_len must be from 2 to the model's own {architecture.most_positions}, got {max_seq_len!r:.80}"
        )
    cache.check_length(max_seq_len, architecture.most_positions)
    return max_seq_len


def fitting_length(
    architecture: Architecture,
    tensors: Mapping[str, TensorInfo],
    load: LoadSettings,
    cache: CacheSettings,
    *,
    most: int,
    available: int | None,
) -> int:
    """Return the default context `most`, or the part of it that fits in memory; `most` if no useful part fits."""
    if available is None or estimate(architecture, tensors, load, cache, num_tokens=most).model <= available:
        return most
    fits = largest_context(architecture, tensors, load, cache, available=available, most=most) // _MULTIPLE * _MULTIPLE
    return fits if fits >= _LEAST else most


def fitting_step(
    architecture: Architecture,
    tensors: Mapping[str, TensorInfo],
    load: LoadSettings,
    cache: CacheSettings,
    *,
    num_tokens: int,
    most: int,
    available: int | None,
) -> int:
    """Return the largest number of tokens in a step: `most`, or less on a device with little memory.

    The number is halved until the step's buffers take an eighth of the available memory, but not below 512.
    """
    while available is not None and most // 2 >= HOST_STEP.tokens:
        needed = estimate(architecture, tensors, replace(load, step_tokens=most), cache, num_tokens=num_tokens)
        if needed.workspace <= available // _WORKSPACE_SHARE:
            break
        most //= 2
    return most
