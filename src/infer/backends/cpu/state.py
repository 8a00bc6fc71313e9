"""What a walk over the table reads at run time: a record at a fixed address, so that a table serves every step.

The arrays that it points to have a fixed capacity; only the counts and the arrays' contents change between steps.
"""

import ctypes
from typing import Any

import numpy as np
import numpy.typing as npt

from infer.backends.cpu.records import MAX_THREADS, pointer

Words = ctypes.Array[ctypes.c_int64]

LINE_BYTES = 64  # of a cache: what threads write lies in lines of its own
GROUP = 8  # threads that meet first where they are many (`barrier`)
_LINE_WORDS = LINE_BYTES // 8

THREAD = np.dtype(
    [
        ("taken", np.int64),  # 2^32 × round + the units of its share that are taken in that round: `units`
        ("round", np.int64),
        ("num_empty", np.int64),  # shares that it has found empty in this round, its own first
        ("num_short", np.int64),  # waits that are to spin only shortly: `barrier`
        ("padding", np.int64, _LINE_WORDS - 4),
    ]
)

STATE = np.dtype(
    [
        ("num_tokens", np.int64),
        ("num_logits", np.int64),
        ("tokens", pointer(np.int64)),  # the step's arrays
        ("positions", pointer(np.int64)),
        ("rows", pointer(np.int64)),
        ("logit_indices", pointer(np.int64)),
        ("padding", np.int64, 10),
        ("released", np.int64),  # barriers that all threads have come to
        ("has_sleepers", np.int64),  # 1: somebody may sleep until the next one is released
        ("dismissed", np.int64),  # the barrier after which thread 0 goes on alone, or 0
        ("released_padding", np.int64, 5),
        ("arrivals", np.int64, (1 + MAX_THREADS // GROUP, _LINE_WORDS)),  # at barriers so far: of all, of each group
        ("stalls", np.int64),  # nanoseconds that threads lost in long waits
        ("stalls_padding", np.int64, 7),
        ("threads", THREAD, MAX_THREADS),
    ]
)


def integers(count: int) -> Words:
    """Zeros, as compiled code and Python share them."""
    return (ctypes.c_int64 * count)()


def words_of(array: npt.NDArray[Any]) -> Words:
    """The same memory as single integers: between two walks Python is cold, and numpy takes ten times as long."""
    return (ctypes.c_int64 * (array.nbytes // 8)).from_buffer(array.data)


def field_index(record: np.dtype, name: str) -> int:
    """Of a field among `words_of` a record."""
    return field_offset(record, name) // 8


def field_offset(record: np.dtype, name: str) -> int:
    assert record.fields is not None
    return int(record.fields[name][1])
