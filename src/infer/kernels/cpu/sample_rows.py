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

from infer.kernels.cpu.layouts import LANES
from infer.kernels.cpu.records import MAX_THREADS
from infer.sampling.history import History
from infer.sampling.rows import Rows

MAX_GROUPS = 1024
_COLUMNS = (
    "temperature",
    "top_k",
    "top_p",
    "log_min_p",
    "repetition_penalty",
    "repetition_window",
    "frequency_penalty",
    "presence_penalty",
    "temperature_last",
    "seed",
    "num_prompt_tokens",
    "min_new_tokens",
    "history_slot",
    "bias_starts",
    "bias_ids",
    "biases",
    "end_starts",
    "end_ids",
    "mask_index",
    "masks",
)
_HISTORY = ("tokens", "previous", "last", "counts", "lengths")
_SCRATCH = (
    ("maxima", np.dtype(np.float32)),  # [rows, groups]
    ("ends", np.dtype(np.float32)),  # [end ids]: logits of the ends that are banned
    ("found", np.dtype(np.int64)),  # [rows, threads]: the best id of each thread's part, −1 for none
    ("scores", np.dtype(np.float32)),  # [rows, threads]: its logit with noise
    ("totals", np.dtype(np.int64)),  # [rows, threads]: sum of weights
    ("num_candidates", np.dtype(np.int64)),  # [rows, threads]
    ("values", np.dtype(np.float32)),  # [rows, padded vocab]: candidates, each thread's where its part begins
    ("ids", np.dtype(np.int32)),
    ("weights", np.dtype(np.int64)),
)

SAMPLE = np.dtype(
    [
        ("logits", np.int64),  # f32 [rows, row_stride]
        ("row_stride", np.int64),
        ("num_rows", np.int64),
        ("starts", np.int64),  # int64 [rows]: where each row's logits begin, one line for each of its entries
        ("entry", np.int64),  # which of them: 0, or the number of drafts before it
        ("alive", np.int64),  # int64 [rows]: 0 where a row samples nothing (any more)
        ("vocab", np.int64),
        ("num_groups", np.int64),
        ("group_vectors", np.int64),
        ("padded", np.int64),  # groups × their size
        ("mask_words", np.int64),
        ("allowed", np.int64),  # int32 [lines of logits, mask_words], or 0
        ("positions", np.int64),  # int64 [rows], of entry 0
        ("position_offset", np.int64),  # added to them: a chain's are those of the tokens before
        ("capacity", np.int64),  # of a history slot
        ("prompt_lengths", np.int64),  # int64 [slots]
        ("sampled", np.int64),  # int64 [rows]
        *((name, np.int64) for name in _COLUMNS),
        *((name, np.int64) for name in _HISTORY),
        *((name, np.int64) for name, _ in _SCRATCH),
        ("generated", np.int64),  # int64 [repeats or entries, rows]: what was sampled
        ("num_generated", np.int64),
        ("stop", np.int64),  # 1: end the chain after this step
        ("stop_ids", np.int64),
        ("num_stop_ids", np.int64),
        ("ended", np.int64),  # int64 [rows]: rows that met a stop id
        ("drafts", np.int64),  # int64 [rows, draft_stride]
        ("draft_stride", np.int64),
        ("num_drafts", np.int64),  # int64 [rows]
        ("counts_sampled", np.int64),  # int64 [rows]: how many tokens a verified step gave
        ("mask_ready", np.int64),  # int64: not 0 when another thread has filled `allowed`
    ]
)

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
    columns = [getattr(rows, name).contiguous() for name in _COLUMNS]
    for name, column in zip(_COLUMNS, columns, strict=True):
        arguments[name] = column.data_ptr()
    arguments["mask_words"] = rows.masks.shape[1]
    arguments["allowed"] = 0 if allowed is None else allowed.data_ptr()
    if history is not None:
        arguments["capacity"] = history.capacity
        arguments["prompt_lengths"] = history.num_prompt_tokens.data_ptr()
        for name in _HISTORY:
            arguments[name] = getattr(history, name).data_ptr()
    sizes = {
        "maxima": num_rows * num_groups,
        "ends": len(rows.end_ids),
        "values": num_rows * padded,
        "ids": num_rows * padded,
        "weights": num_rows * padded,
    }
    scratch = [_uncleared(sizes.get(name, num_rows * MAX_THREADS), dtype) for name, dtype in _SCRATCH]
    for (name, _), memory in zip(_SCRATCH, scratch, strict=True):
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
