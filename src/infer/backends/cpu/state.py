"""What a walk over the table reads at run time: a record at a fixed address, so that a table serves every step.

The arrays that it points to have a fixed capacity; only the counts and the arrays' contents change between steps.
"""

import ctypes
from typing import Any

import numpy as np
import numpy.typing as npt

Words = ctypes.Array[ctypes.c_int64]

_ADDRESS = np.int64

STATE = np.dtype(
    [
        ("num_tokens", np.int64),
        ("num_logits", np.int64),
        ("tokens", _ADDRESS),  # int64 each: the step's arrays
        ("positions", _ADDRESS),
        ("rows", _ADDRESS),
        ("logit_indices", _ADDRESS),
        ("padding", np.int64, 10),
        ("barrier", np.int64),  # arrivals so far, on a cache line of its own
        ("dismissed", np.int64),  # the arrivals after which thread 0 goes on alone, or 0
        ("barrier_padding", np.int64, 14),
        ("stalls", np.int64),  # cycles that threads lost in long waits
        ("stalls_padding", np.int64, 7),
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
