"""End a process after its parent has ended. Its stdin shows this, because the parent has the other end."""

import os
import select
import threading
import time


def end_after_parent(grace_seconds: float) -> None:
    """Start a thread that ends this process `grace_seconds` after the other end of stdin has closed.

    Until then the process may end by itself. The thread ends it even during the loading of a model. It reads no bytes.
    """
    threading.Thread(target=_await_end, args=[grace_seconds], name="infer-parent", daemon=True).start()


def _await_end(grace_seconds: float) -> None:
    ends = select.poll()
    ends.register(0, 0)  # a closed end is always reported
    ends.poll()
    time.sleep(grace_seconds)
    os._exit(0)
