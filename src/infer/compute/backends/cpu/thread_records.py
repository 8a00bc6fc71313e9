"""Records of the thread pool and of its dispatch tables: see `cpu.records`."""

import numpy as np

from infer.compute.backends.cpu.records import WORD, pointer

MAX_THREADS = 256

# After a command: no barrier, one, one if there are several tokens, or one whose wait is for a file, so that it says
# nothing about the machine's cores.
NO_BARRIER, BARRIER, BARRIER_IF_MANY, READ_BARRIER = 0, 1, 2, 3

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
