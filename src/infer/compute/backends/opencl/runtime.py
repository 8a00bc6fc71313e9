"""A device, its context and its single in-order queue. Each program is built once."""

import warnings
from functools import cache
from pathlib import Path
from typing import Any, final

import pyopencl as cl

from infer.compute.backends.opencl.devices import full_name
from infer.compute.backends.opencl.memory import Memory
from infer.errors import InvalidRequestError

_UNKNOWN_CPU = "unknown target CPU"  # Clang's words
_FOLDER = Path(__file__).parent / "kernels"
_GROUP_SIZES = (16, 8, 4, 2)
_GROUPS_PER_UNIT = 8  # work groups for each of a CPU's cores, where there are as many


@final
class Runtime:
    def __init__(self, device: cl.Device) -> None:
        self.device, self.name = device, full_name(device)
        self.context = cl.Context([device])
        self.queue = cl.CommandQueue(self.context, device)
        self.memory = Memory(self.queue, self.name)
        self.is_cpu = bool(device.type & cl.device_type.CPU)
        self._before = ["inlined.cl", "common.cl"] if self.is_cpu else ["common.cl"]
        self.lanes = 16 if self.is_cpu else 1  # rows of a weight that a work item has as a vector
        self._programs: dict[tuple[Any, ...], cl.Program] = {}

    def kernel(self, source: str, name: str, macros: dict[str, Any]) -> cl.Kernel:
        """Return a kernel with arguments of its own. Raises InvalidRequestError if its program does not build."""
        key = (source, *sorted(macros.items()))
        if key not in self._programs:
            self._programs[key] = self._build(source, macros)
        return cl.Kernel(self._programs[key], name)

    def _build(self, source: str, macros: dict[str, Any]) -> cl.Program:
        options = ["-cl-std=CL1.2"]
        if self.device.single_fp_config & cl.device_fp_config.CORRECTLY_ROUNDED_DIVIDE_SQRT:
            options.append("-cl-fp32-correctly-rounded-divide-sqrt")
        values = [f"#define {name} {value}\n" for name, value in macros.items()]  # a grid is too long for an option
        program = cl.Program(self.context, "".join([*values, *map(_text, [*self._before, source])]))
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", cl.CompilerWarning)  # Intel's compiler tells what it vectorised
                return program.build(options)
        except cl.Error as error:
            lines = [line for line in str(error).splitlines() if "error" in line] or str(error).splitlines()
            if _UNKNOWN_CPU in str(error):
                raise InvalidRequestError(
                    f"device opencl: {self.name} does not know this CPU, which is newer than its compiler "
                    f"({lines[0].strip()}): install a newer release of it, or Intel's runtime (pip install "
                    "intel-opencl-rt intel-cmplr-lib-rt) and use --device opencl:intel, or use --device cpu"
                ) from error
            raise InvalidRequestError(
                f"device opencl: {source} does not build on {self.name}: {lines[0].strip()}: use another device, or "
                "--device cpu"
            ) from error

    def group_size(self, width: int, items: int) -> tuple[int, int] | None:
        """Return the work items per group. On a CPU, groups are as large as leaves work for all cores; None: the driver
        chooses.
        """
        if not self.is_cpu:
            return None
        most = width * items // (_GROUPS_PER_UNIT * self.device.max_compute_units)
        return next((size for size in _GROUP_SIZES if width % size == 0 and size <= most), 1), 1


@cache
def _text(source: str) -> str:
    return (_FOLDER / source).read_text()
