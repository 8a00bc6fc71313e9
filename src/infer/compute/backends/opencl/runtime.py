"""A device, its context and its single in-order queue. Each program is built once."""

import warnings
from functools import cache
from pathlib import Path
from typing import Any, final

import pyopencl as cl

from infer.compute.backends.opencl.devices import ITEMS, full_name
from infer.compute.backends.opencl.memory import Memory
from infer.errors import InvalidRequestError

_UNKNOWN_CPU = "unknown target CPU"  # Clang's words
_FOLDER = Path(__file__).parent / "kernels"


@final
class Runtime:
    def __init__(self, device: cl.Device) -> None:
        self.device, self.name = device, full_name(device)
        self.context = cl.Context([device])
        self.queue = cl.CommandQueue(self.context, device)
        self.memory = Memory(self.queue, self.name)
        # OpenCL C 3.0 declares the products of four bytes, on devices that have them.
        has_products = "cl_khr_integer_dot_product" in device.extensions.split()
        self._options = ["-cl-std=CL3.0" if has_products else "-cl-std=CL1.2"]
        if device.single_fp_config & cl.device_fp_config.CORRECTLY_ROUNDED_DIVIDE_SQRT:
            self._options.append("-cl-fp32-correctly-rounded-divide-sqrt")
        self._programs: dict[tuple[Any, ...], cl.Program] = {}

    def kernel(self, source: str, name: str, macros: dict[str, Any]) -> cl.Kernel:
        """Return a kernel with arguments of its own. Raises InvalidRequestError if its program does not build."""
        key = (source, *sorted(macros.items()))
        if key not in self._programs:
            self._programs[key] = self._build(source, macros)
        return cl.Kernel(self._programs[key], name)

    def _build(self, source: str, macros: dict[str, Any]) -> cl.Program:
        values = [f"#define {name} {value}\n" for name, value in {"ITEMS": ITEMS, **macros}.items()]
        program = cl.Program(self.context, "".join([*values, _text("common.cl"), _text(source)]))
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", cl.CompilerWarning)  # Intel's compiler tells what it vectorised
                return program.build(self._options)
        except cl.Error as error:
            lines = [line for line in str(error).splitlines() if "error" in line] or str(error).splitlines()
            why = f"{source} does not build on {self.name}: {lines[0].strip()}: use another device, or --device cpu"
            if _UNKNOWN_CPU in str(error):
                why = (
                    f"{self.name} does not know this CPU, which is newer than its compiler "
                    f"({lines[0].strip()}): install a newer release of it, or Intel's runtime (pip install "
                    "intel-opencl-rt intel-cmplr-lib-rt) and use --device opencl:intel, or use --device cpu"
                )
            raise InvalidRequestError(f"device opencl: {why}") from error


@cache
def _text(source: str) -> str:
    return (_FOLDER / source).read_text()
