"""Start threads that run dispatch tables: with a sufficient stack, and with signals only on the main thread."""

import os
import signal
import threading

_STACK_BYTES = 2 << 20
# A thread must receive its own faults, so that faulthandler shows their place.
_FAULTS = {signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT, signal.SIGTRAP}

_starting = threading.RLock()  # the size of new stacks is a setting of the process
os.register_at_fork(before=_starting.acquire, after_in_parent=_starting.release, after_in_child=_starting.release)


def start_thread(thread: threading.Thread, *, blocks_signals: bool = False) -> None:
    """Start a thread with enough stack, whatever the default of the program or of the C library is.

    With `blocks_signals`, signals interrupt no system call of the thread or of the threads that it starts.
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
