"""Start threads that run dispatch tables: with a sufficient stack, and with signals left to the main thread."""

import os
import signal
import threading

_STACK_BYTES = 2 << 20
# Faults of the thread itself are its own: faulthandler shows where they come from.
_FAULTS = {signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT, signal.SIGTRAP}

_starting = threading.RLock()  # the size of new stacks is the process's
os.register_at_fork(before=_starting.acquire, after_in_parent=_starting.release, after_in_child=_starting.release)


def start_thread(thread: threading.Thread, *, blocks_signals: bool = False) -> None:
    """Start a thread with enough stack, whatever the program or the C library gives its threads.

    With `blocks_signals`, no system call of the thread, nor of those that it starts, is interrupted by a signal.
    """
    with _starting:
        size = threading.stack_size(_STACK_BYTES)
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals() - _FAULTS) if blocks_signals else None
        try:
            thread.start()
        finally:
            threading.stack_size(size)
            if blocked is not None:
                signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
