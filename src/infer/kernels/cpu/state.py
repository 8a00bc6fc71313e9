"""What a walk over the table reads at run time: a record at a fixed address, so that a table serves every step.

The arrays that it points to have a fixed capacity; only the counts and the arrays' contents change between steps.
"""

import numpy as np

_ADDRESS = np.int64

STATE = np.dtype(
    [
        ("num_tokens", np.int64),
        ("num_wanted", np.int64),
        ("tokens", _ADDRESS),  # int64 each: the step's arrays
        ("positions", _ADDRESS),
        ("rows", _ADDRESS),
        ("wanted", _ADDRESS),
        ("padding", np.int64, 10),
        ("barrier", np.int64),  # arrivals so far, on a cache line of its own
        ("dismissed", np.int64),  # the arrivals behind which thread 0 goes on alone, or 0
        ("barrier_padding", np.int64, 14),
        ("stalls", np.int64),  # cycles that threads lost in long waits
        ("stalls_padding", np.int64, 7),
    ]
)


def field_offset(record: np.dtype, name: str) -> int:
    assert record.fields is not None
    return int(record.fields[name][1])
