"""The `infer` command: text on stdout, everything else on stderr, one line per error.

Exit status: 0, 1 our failure or the machine's, 2 bad input, 3 a bad model, 130 Ctrl-C, 141 closed pipe, 143 SIGTERM.
Help and version load no torch: each command loads the heavy modules that it needs.
"""

import errno
import gc
import os
import resource
import sys
import traceback
import warnings
from collections.abc import Sequence
from typing import Any

import click

from infer.cli.option_fields import Invocation
from infer.cli.process_streams import STDOUT, Terminated, ignore_signals, raise_on_sigterm, silence_stdout
from infer.cli.subcommands import infer
from infer.errors import InferError

_NO_MEMORY = ("failed to map segment", "cannot allocate memory", "Cannot allocate memory", "can't allocate memory")
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command line (`sys.argv` by default) and return its exit status."""
    invocation = Invocation()
    try:
        raise_on_sigterm()
        warnings.showwarning = _say
        status = _run(list(sys.argv[1:] if arguments is None else arguments), invocation)
        sys.stdout.flush()
    except (KeyboardInterrupt, click.Abort):
        status = 130
    except Terminated:
        status = 143
    except BrokenPipeError:
        silence_stdout()
        status = 141
    except (InferError, click.ClickException) as error:
        if invocation.verbose:
            traceback.print_exc()
        _say(_message(error))
        status = error.exit_status if isinstance(error, InferError) else 2
    except Exception as error:
        if invocation.verbose:
            traceback.print_exc()
        hint = "" if invocation.verbose else " (-v shows a traceback)"
        _say(_refusal(error) or f"our own failure, {type(error).__name__}: {error}{hint}")
        status = 1
        if isinstance(error, OSError) and error.filename == STDOUT:
            silence_stdout()
    ignore_signals()
    gc.unfreeze()  # objects that `keeping_garbage` kept: native modules report objects that are never freed
    return status


def _run(arguments: list[str], invocation: Invocation) -> int:
    try:
        with infer.make_context("infer", arguments, obj=invocation) as context:
            return infer.invoke(context) or 0
    except click.exceptions.Exit as done:
        return done.exit_code


def _message(error: Exception) -> str:
    if not isinstance(error, click.ClickException):
        return str(error)
    message = error.format_message()
    context = error.ctx if isinstance(error, click.UsageError) else None
    return f"{message} (see {context.command_path} --help)" if context else message


def _refusal(error: Exception) -> str | None:
    """Return a message if the machine refused memory, files, threads or space on stdout's disk, else None.

    Numba refuses a number of threads from its environment variable.
    """
    if isinstance(error, ValueError) and "Number of threads specified" in str(error):
        given = os.environ.get("NUMBA_NUM_THREADS")
        return f"NUMBA_NUM_THREADS must be at least 1, got {given!r}: remove it, and give --threads"
    number = error.errno if isinstance(error, OSError) else None
    text = str(error) if isinstance(error, ImportError | RuntimeError) else ""
    if isinstance(error, MemoryError) or number == errno.ENOMEM or any(sign in text for sign in _NO_MEMORY):
        return "out of memory: a smaller model, a shorter --max-seq-len or a smaller --dtype may fit"
    if number in (errno.EMFILE, errno.ENFILE) or "Too many open files" in text:
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        return f"too many open files: this process may open {limit} (raise the limit with ulimit -n)"
    if "can't start new thread" in text:
        return "the system refuses to start another thread: use fewer --threads, or raise ulimit -u or -v"
    if isinstance(error, OSError) and error.filename is not None and number in _NO_ROOM:
        return f"{error.filename}: {error.strerror}"
    return f"{STDOUT}: {error.strerror}" if isinstance(error, OSError) and error.filename == STDOUT else None


def _say(message: Warning | str, *where: Any, **also: Any) -> None:
    """Print a warning or an error on one line."""
    print("infer:", " ".join(str(message).split()), file=sys.stderr)
