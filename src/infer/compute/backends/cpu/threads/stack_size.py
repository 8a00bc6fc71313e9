"""Stack of a thread that runs a table: kernels keep scratch there, 80 KB at most, and Python calls them."""

import ctypes
import sys
import threading
from contextlib import suppress
from functools import cache

from infer.errors import InferError

_NEEDED_BYTES = 512 << 10
_ATTRIBUTE_BYTES = 256  # more than a pthread_attr_t of any system


def check_stack() -> None:
    """Raise InferError if the calling thread's stack is too small: it would end the process without a message."""
    size = stack_bytes()
    if size is not None and size < _NEEDED_BYTES:
        raise InferError(
            f"this thread has a stack of {size >> 10} KB, and running a model takes {_NEEDED_BYTES >> 10}: "
            "call threading.stack_size(1 << 20) before the thread is started"
        )


def stack_bytes() -> int | None:
    """Return the stack size of the calling thread; None if the system does not report it."""
    library = _libc()
    this = ctypes.c_void_p(threading.get_ident())
    with suppress(AttributeError):
        if sys.platform == "darwin":
            library.pthread_get_stacksize_np.restype = ctypes.c_size_t
            return int(library.pthread_get_stacksize_np(this))
        attributes, size = (ctypes.c_char * _ATTRIBUTE_BYTES)(), ctypes.c_size_t()
        if library.pthread_getattr_np(this, attributes) == 0:
            is_known = library.pthread_attr_getstacksize(attributes, ctypes.byref(size)) == 0
            library.pthread_attr_destroy(attributes)
            return size.value if is_known else None
    return None


@cache
def _libc() -> ctypes.CDLL:
    """Return the process's C library, without loading it again: each thread asks it before its first run."""
    return ctypes.CDLL(None)
