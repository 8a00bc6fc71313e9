"""Exceptions that a signal's handler raises, such as an alarm's, in whatever call the main thread is at."""

import signal
from functools import partial
from types import CodeType, FunctionType, MethodType
from typing import Any


def raised_by_handler(error: BaseException) -> bool:
    """Whether a handler written in Python raised it. It says nothing about the call that it came out of."""
    codes = {_code(handler) for handler in map(signal.getsignal, signal.valid_signals()) if callable(handler)}
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code not in codes:
        trace = trace.tb_next
    return trace is not None


def _code(handler: Any) -> CodeType | None:
    while isinstance(handler, partial):
        handler = handler.func
    function = handler if isinstance(handler, FunctionType | MethodType) else type(handler).__call__
    code: CodeType | None = getattr(function, "__code__", None)
    return code
