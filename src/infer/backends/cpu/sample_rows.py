"""What the sampler's commands read: addresses of a batch's columns, of its history, and of scratch.

A row's vocabulary is cut into at most 1,024 groups of a whole number of vectors; the threads share out the groups.

    scan      edit the logits (bias, penalties, bans) and store the largest of each group
    narrow    from those: greedy rows find their token; unfiltered rows search the best score; the others collect
              candidates, a superset of what their filters keep
    choose    a row a thread: the filters on the candidates, noise, the largest
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from infer.backends.cpu.layouts import LANES
from infer.backends.cpu.records import MAX_THREADS, SAMPLE, SAMPLE_COLUMNS, SAMPLE_HISTORY, SAMPLE_SCRATCH
from infer.sampling.columns import Rows
from infer.sampling.history import History

MAX_GROUPS = 1024

Arguments = npt.NDArray[Any]


def bind(
    logits: Tensor, rows: Rows, history: History | None, allowed: Tensor | None, positions: int, offset: int
) -> tuple[Arguments, Sequence[Any]]:
    """The arguments for a batch, and what must live as long as they do. `positions` is an address."""
    num_rows, vocab = len(rows), rows.vocab_size
    num_vectors = -(-vocab // LANES)
    group_vectors = -(-num_vectors // MAX_GROUPS)
    num_groups = -(-num_vectors // group_vectors)
    padded = num_groups * group_vectors * LANES
    arguments = np.zeros(1, SAMPLE)
    arguments["logits"], arguments["row_stride"], arguments["vocab"] = logits.data_ptr(), logits.stride(0), vocab
    arguments["num_groups"], arguments["group_vectors"], arguments["padded"] = num_groups, group_vectors, padded
    arguments["positions"], arguments["position_offset"] = positions, offset
    columns = [getattr(rows, name).contiguous() for name in SAMPLE_COLUMNS]
    for name, column in zip(SAMPLE_COLUMNS, columns, strict=True):
        arguments[name] = column.data_ptr()
    arguments["mask_words"] = rows.masks.shape[1]
    arguments["allowed"] = 0 if allowed is None else allowed.data_ptr()
    if history is not None:
        arguments["capacity"] = history.capacity
        arguments["prompt_lengths"] = history.num_prompt_tokens.data_ptr()
        for name in SAMPLE_HISTORY:
            arguments[name] = getattr(history, name).data_ptr()
    sizes = {
        "maxima": num_rows * num_groups,
        "ends": len(rows.end_ids),
        "values": num_rows * padded,
        "ids": num_rows * padded,
        "weights": num_rows * padded,
    }
    scratch = [_uncleared(sizes.get(name, num_rows * MAX_THREADS), dtype) for name, dtype in SAMPLE_SCRATCH]
    for (name, _), memory in zip(SAMPLE_SCRATCH, scratch, strict=True):
        arguments[name] = memory.ctypes.data
    own = np.stack([np.arange(num_rows), np.ones(num_rows), np.zeros(num_rows)]).astype(np.int64)
    arguments["num_rows"] = num_rows
    for name, line in zip(("starts", "alive", "sampled"), own, strict=True):
        arguments[name] = line.ctypes.data
    return arguments, (logits, rows, history, allowed, columns, scratch, own, own[2])


def _uncleared(count: int, dtype: np.dtype) -> Arguments:
    """`aligned` without the zeros: megabytes that a batch may never touch."""
    raw = np.empty(count * dtype.itemsize + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + count * dtype.itemsize].view(dtype)
