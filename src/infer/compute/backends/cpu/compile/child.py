"""A process that compiles kernels by name. It exists because Numba lets only one thread of a process compile.

A request is a line of JSON: maker, variant and the name of the record that the kernel takes. An answer is a line of
JSON with the symbol and the size of the object code, then that code. The size is −1 if no other process could use the
code.
"""

import gc
import json
import os
import sys

from infer.compute.backends.cpu.compile.compiler import compile_command
from infer.compute.backends.cpu.compile.kernel import Kernel, records_by_name


def main() -> None:
    gc.disable()  # a short life, in which the collector takes a fifteenth of the time
    sys.modules["scipy"] = None  # type: ignore[assignment]  # Numba would load it for matrix products that no kernel has
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever prints must not be taken for an answer
    for line in sys.stdin:
        maker, variant, record = json.loads(line)
        kernel, arguments = Kernel(maker, tuple(variant)), records_by_name()[record]
        compiled = compile_command(kernel.label, kernel.make, arguments)
        code = compiled.object_code
        answer = {"symbol": compiled.symbol, "size": -1 if code is None else len(code)}
        answers.write(json.dumps(answer).encode() + b"\n" + (code or b""))
        answers.flush()
