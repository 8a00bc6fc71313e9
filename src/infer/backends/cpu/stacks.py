"""How much stack a thread has that walks: kernels keep scratch there, 40 KB at most, and Python calls them."""

import ctypes
import os
import sys
import threading
from contextlib import suppress

from infer.errors import InferError

_NEEDED_BYTES = 512 << 10
_WORKER_BYTES = 2 << 20
_ATTRIBUTE_BYTES = 256  # more than a pthread_attr_t of any system

_starting = threading.RLock()  # the size of new stacks is the process's
os.register_at_fork(before=_starting.acquire, after_in_parent=_starting.release, after_in_child=_starting.release)


def start_worker(worker: threading.Thread) -> None:
    """Start it with a stack that suffices, whatever the program or the C library gives its threads."""
    with _starting:
        before = threading.stack_size(_WORKER_BYTES)
        try:
            worker.start()
        finally:
            threading.stack_size(before)


def check_stack() -> None:
    """Raises InferError where the thread that calls has too little: it would end the process without a word."""
    size = stack_bytes()
    if size is not None and size < _NEEDED_BYTES:
        raise InferError(
            f"this thread has a stack of {size >> 10} KB, and running a model takes {_NEEDED_BYTES >> 10}: "
            "call threading.stack_size(1 << 20) before the thread is started"
        )


def stack_bytes() -> int | None:
    """Of the thread that calls; None where the system does not say."""
    library = ctypes.CDLL(None)
    this = ctypes.c_void_p(threading.get_ident())
    with suppress(AttributeError):
        if sys.platform == "darwin":
            library.pthread_get_stacksize_np.restype = ctypes.c_size_t
            return int(library.pthread_get_stacksize_np(this))
        attributes, size = ctypes.create_string_buffer(_ATTRIBUTE_BYTES), ctypes.c_size_t()
        if library.pthread_getattr_np(this, attributes) == 0:
            is_known = library.pthread_attr_getstacksize(attributes, ctypes.byref(size)) == 0
            library.pthread_attr_destroy(attributes)
            return size.value if is_known else None
    return None
