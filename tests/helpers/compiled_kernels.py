"""Runs programs with Triton's compiler: the interpreter is chosen for the tests' own process."""

import json
import os
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from extent import IS_WHOLE, usual_or_all
from watched import script_command

Kernel = Mapping[str, Any]  # facts of a kernel's code, by their names in `gpu_compiler.code_of`
Kernels = dict[str, Any]
Kinds = dict[str, Kernels]
MAX_SHARED_BYTES = 101_376  # for one program on sm_89 and sm_120
TARGETS = {"80", "89", "90", "120"}
NUM_TARGETS = usual_or_all(2, len(TARGETS))  # for which a kernel is compiled


def run_compiled(script: Path, *arguments: str, cache: Path) -> str:
    """Return the output of a program. INFER_TRITON names a folder with another Triton for it."""
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(cache)}
    paths = [os.environ.get("INFER_TRITON"), os.environ.get("PYTHONPATH")]
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    command = script_command(script, *arguments, seconds=3600.0)  # on a busy machine
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def code_of_kinds(cache: Path) -> Kinds:
    """Return the facts of each kernel of each kind of `gpu_code`, by its name, types and architecture."""
    program = Path(__file__).with_name("gpu_code.py")
    return dict(json.loads(run_compiled(program, *(["all"] if IS_WHOLE else []), cache=cache)))


def count(kernel: Kernel, pattern: str, instructions: str = "instructions") -> int:
    return sum(times for name, times in kernel[instructions].items() if re.match(pattern, name))
