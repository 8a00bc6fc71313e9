"""Commands that run Python. A process that hangs prints its stack on stderr, and ends with status 1."""

import os
import subprocess
import sys

LIMIT_SECONDS = 600
_WATCH = "import faulthandler; faulthandler.dump_traceback_later({seconds}, exit=True)\n"
RUN_SCRIPT = """
import os, runpy, sys
del sys.argv[0]
sys.path[0] = os.path.dirname(sys.argv[0])
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def python_command(
    code: str, *arguments: object, options: tuple[str, ...] = (), seconds: float = LIMIT_SECONDS
) -> list[str]:
    """Return the command `python OPTIONS -c CODE ARGUMENTS`."""
    return [sys.executable, *options, "-c", _WATCH.format(seconds=seconds) + code, *map(str, arguments)]


def script_command(script: object, *arguments: object, seconds: float = LIMIT_SECONDS) -> list[str]:
    """Return the command `python SCRIPT ARGUMENTS`."""
    return python_command(RUN_SCRIPT, script, *arguments, seconds=seconds)


def run_python(code: str, *arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run `python -c CODE ARGUMENTS` with these environment variables. It can import what this process can."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **environment}
    return subprocess.run(python_command(code, *arguments), env=env, capture_output=True, text=True, check=False)
