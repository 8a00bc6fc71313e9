"""Records of the thread pool and of its dispatch tables, and the state that a run of a table reads: see `cpu.records`.

The state is at a fixed address, so that a table serves every step. The arrays that it points to have a fixed capacity;
only the counts and the arrays' contents change between steps.
"""

import ctypes
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from infer.compute.backends.cpu.records import WORD, pointer

MAX_THREADS = 256

# After a command: no barrier, one, one if there are several tokens, one whose wait is for a file, so that it says
# nothing about the machine's cores, or one if the threads have set `needs_merge`.
NO_BARRIER, BARRIER, BARRIER_IF_MANY, READ_BARRIER, BARRIER_IF_MERGED = 0, 1, 2, 3, 4

ROW = np.dtype([("function", np.int64), ("arguments", np.int64), ("barrier", np.int64)])

TABLE = np.dtype(
    [
        ("rows", pointer(ROW)),
        ("num_rows", np.int64),
        ("repeats", np.int64),  # how often to run the table
        ("again", np.int64),  # the row at which every repeat but the first begins
        ("stop", pointer(np.int64)),  # which a command sets to end the repeats, or 0
        ("times", pointer(np.int64)),  # [num_rows]: cycles spent by thread 0 are added here, or 0
        ("completed", np.int64),  # how often from the first row on, thanks to `stop` less than `repeats`
        # Nanoseconds that thread 0 may wait, beyond its share of the time, before it goes on alone; 0: for ever.
        ("patience", np.int64),
        ("has_run", np.int64),  # 0: a signal came before it was its turn
        ("began", np.int64),  # nanoseconds, as time.perf_counter_ns
        ("ended", np.int64),
    ]
)

FLAG = np.dtype([("is_set", WORD)])

LINE_WORDS = 8  # of a cache line, in 8 bytes each: what threads write lies in lines of its own

JOB = np.dtype(
    [
        ("generation", WORD),  # 512 × the number of runs so far + threads of the current one
        ("pad0", np.int64, 7),
        ("finished", WORD),  # workers that finished the current one
        ("has_sleepers", WORD),  # 1: thread 0 may sleep until all have
        ("pad1", np.int64, 6),
        ("dispatch", np.int64),
        ("arguments", np.int64),
        ("state", np.int64),
        ("owner", np.int64),  # the thread that runs a table, as threading.get_ident; 0: none
        ("is_closed", WORD),
        ("pad2", np.int64, 3),
        (
            "turn",
            np.int64,
            LINE_WORDS,
        ),  # a semaphore, which the running thread holds, in a line of its own; a sem_t has 32 bytes
        ("sleeping", np.int64, MAX_THREADS),
        ("seen", np.int64, MAX_THREADS),  # the generation that a worker did last
        ("is_served", np.int64, MAX_THREADS),  # 1: a worker has begun to do this thread's parts
        ("semaphores", np.int64, (MAX_THREADS, LINE_WORDS)),  # in which workers sleep
    ]
)


Words = ctypes.Array[ctypes.c_int64]

GROUP = 8  # threads that wait for each other first if there are many (`barrier`)

THREAD = np.dtype(
    [
        ("taken", WORD),  # 2^32 × round + the units of its share that are taken in that round: `work_stealing`
        ("round", np.int64),
        ("num_empty", np.int64),  # shares that it has found empty in this round, its own first
        ("num_short", np.int64),  # waits that are to spin only shortly: `barrier`
        ("needs_merge", np.int64),  # 1: the next command reads results of several threads; all set it alike
        ("padding", np.int64, LINE_WORDS - 5),
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
    """Return a record's memory as a ctypes structure, whose attributes are the record's fields.

    Between two runs Python's code is cold, and numpy's index takes ten times as long.
    """
    return _structure(record.dtype).from_buffer(record.data)


@cache
def _structure(record: np.dtype) -> Any:
    fields = [(name, np.ctypeslib.as_ctypes_type(field[0])) for name, field in (record.fields or {}).items()]
    return type("Fields", (ctypes.Structure,), {"__slots__": (), "_fields_": fields})  # slots: no other attributes
