"""The `infer` command as a process: quiet if it is interrupted early, and fast to exit.

Only `os`, `sys` and `signal` are imported before Ctrl-C has a handler: an interrupted import prints a traceback.
"""

import os
import sys

try:
    import signal
except KeyboardInterrupt:
    os._exit(130)


def run() -> None:
    """Run the command line of this process and end the process with its exit status. Never returns."""
    leaves_quietly = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if leaves_quietly:
        signal.signal(signal.SIGINT, lambda number, frame: os._exit(130))
    if sys.platform == "win32":
        from infer.errors import NO_WINDOWS

        sys.exit(NO_WINDOWS)
    from infer.cli import main
    from infer.cli.process_streams import end_process, prepare_streams

    try:
        if leaves_quietly:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        prepare_streams()
        status = main()
    except KeyboardInterrupt:
        status = 130
    end_process(status)


if __name__ == "__main__":
    run()
