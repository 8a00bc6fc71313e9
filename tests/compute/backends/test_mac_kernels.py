"""The CPU kernels compile for Apple's processors, and call only functions that a process on macOS has."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from extent import IS_WHOLE
from infer.compute.backends.cpu.compile.linked_code import NEVER_CALLED
from watched import script_command

pytestmark = pytest.mark.slow(rest=0)  # it compiles for a minute

PROGRAM = Path(__file__).parents[2] / "helpers" / "mac_kernels.py"
# Of macOS's C library; of Python, which numba's wrapper would call for an error; and those that are never called.
SYSTEM = {
    *("clock_gettime", "pread", "pthread_self", "sched_yield", "usleep"),
    *("dispatch_semaphore_signal", "dispatch_semaphore_wait", "dispatch_time"),
    *("os_sync_wait_on_address", "os_sync_wake_by_address_all"),
    *("bzero", "memcpy", "memmove", "memset", "memset_pattern16"),
    *("exp", "expf", "fmod", "fmodf", "log", "logf", "pow", "powf", "round", "roundf"),
}
PYTHON = {
    *("PyBytes_FromStringAndSize", "PyErr_Clear", "PyErr_SetNone", "PyErr_SetString", "PyErr_WriteUnraisable"),
    *("PyExc_RuntimeError", "PyExc_StopIteration", "PyExc_SystemError", "PyUnicode_FromString", "Py_DecRef"),
}


def test_kernels_for_a_mac_call_only_what_macos_has() -> None:
    command = script_command(PROGRAM, *(["all"] if IS_WHOLE else []), seconds=3600.0)
    environment = {**os.environ, "NUMBA_OPT": "3" if IS_WHOLE else "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["kernels"] >= (290 if IS_WHOLE else 20)
    unknown = {
        name: kernel for name, kernel in found["undefined"].items() if name not in SYSTEM | PYTHON | NEVER_CALLED
    }
    assert not unknown
    assert {"os_sync_wait_on_address", "dispatch_semaphore_wait", "pread"} <= set(found["undefined"])
