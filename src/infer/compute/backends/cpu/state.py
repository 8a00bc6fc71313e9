"""State that a run of the table reads: a record at a fixed address, so that a table serves every step.

The arrays that it points to have a fixed capacity; only the counts and the arrays' contents change between steps.
"""

import ctypes
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from infer.compute.backends.cpu.records import WORD, pointer
from infer.compute.backends.cpu.thread_records import LINE_WORDS, MAX_THREADS

Words = ctypes.Array[ctypes.c_int64]

GROUP = 8  # threads that wait for each other first if there are many (`barrier`)

THREAD = np.dtype(
    [
        ("taken", WORD),  # 2^32 × round + the units of its share that are taken in that round: `work_stealing`
        ("round", np.int64),
        ("num_empty", np.int64),  # shares that it has found empty in this round, its own first
        ("num_short", np.int64),  # waits that are to spin only shortly: `barrier`
        ("padding", np.int64, LINE_WORDS - 4),
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
        ("released", WORD),  # barriers that all threads have come to
        ("has_sleepers", WORD),  # 1: somebody may sleep until the next one is released
        ("dismissed", WORD),  # the barrier after which thread 0 goes on alone, or 0
        ("released_padding", np.int64, 5),
        ("arrivals", np.int64, (1 + MAX_THREADS // GROUP, LINE_WORDS)),  # at barriers so far: of all, of each group
        ("stalls", WORD),  # nanoseconds that threads lost in long waits
        ("reading", np.int64),  # nanoseconds of thread 0 in commands that read files, with the waits for other threads
        ("stalls_padding", np.int64, 6),
        ("threads", THREAD, MAX_THREADS),
    ]
)


def integers(count: int) -> Words:
    """Return zeros that compiled code and Python share."""
    return (ctypes.c_int64 * count)()


def fields_of(record: npt.NDArray[Any]) -> Any:
    """Return the same memory as attributes, by the names of the record's fields.

    Between two runs Python's code is cold, and numpy's index takes ten times as long.
    """
    return _structure(record.dtype).from_buffer(record.data)


@cache
def _structure(record: np.dtype) -> Any:
    fields = [(name, np.ctypeslib.as_ctypes_type(field[0])) for name, field in (record.fields or {}).items()]
    return type("Fields", (ctypes.Structure,), {"__slots__": (), "_fields_": fields})  # slots: no other attributes
