"""Programs in forks of a process that has imported torch and `infer`, which takes longer than most programs do.

Each runs as a program does, to the interpreter's end: its own streams, signals, functions of `atexit` and finalizers.
"""

import json
import os
import subprocess
import sys
from typing import final

from watched import LIMIT_SECONDS

_SERVER = """
import faulthandler, json, os, sys, tempfile
import torch
from infer import LLM, AsyncLLM
for asked in map(json.loads, iter(sys.stdin.readline, "")):
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        if (child := os.fork()) == 0:
            for source, target in ((os.open(os.devnull, os.O_RDONLY), 0), (out.fileno(), 1), (err.fileno(), 2)):
                os.dup2(source, target)
            break
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        texts = [(each.seek(0), each.read().decode())[1] for each in (out, err)]
    print(json.dumps([status, *texts]), flush=True)
else:
    sys.exit()
faulthandler.dump_traceback_later(asked["seconds"], exit=True)
sys.argv = ["-c", *asked["arguments"]]
code = compile(asked["code"], "<program>", "exec")
del asked, child, err, out, source, target
exec(code)
"""


@final
class Programs:
    """The process, in which every warning is an error, and its forks."""

    def __init__(self) -> None:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        command = [sys.executable, "-W", "error", "-c", _SERVER]
        self._server = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )

    def run(self, code: str, *arguments: object, seconds: float = LIMIT_SECONDS) -> subprocess.CompletedProcess[str]:
        """Run `python -c CODE ARGUMENTS`. Return status and output. If it hangs, it prints its stack on stderr."""
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        asked = {"code": code, "arguments": [str(each) for each in arguments], "seconds": seconds}
        self._server.stdin.write(json.dumps(asked) + "\n")
        self._server.stdin.flush()
        status, out, err = json.loads(self._server.stdout.readline())
        return subprocess.CompletedProcess(["-c", *asked["arguments"]], status, out, err)

    def close(self) -> None:
        self._server.communicate()
