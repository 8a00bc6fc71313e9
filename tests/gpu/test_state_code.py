"""Claims about the machine code of layers with a state. Triton compiles it without a GPU."""

import json
from pathlib import Path
from typing import Any

import pytest

from extent import IS_WHOLE

pytest.importorskip("triton", reason="Triton is not installed")

from test_gpu_code import Kernels
from test_gpu_sampler import run_compiled

MAX_SHARED_BYTES = 101_376  # of a program on sm_89 and sm_120
MOST_REGISTERS = {"mix_runs": 255, "multiply_keys": 168}  # others: 64


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Kernels:
    program = Path(__file__).parents[1] / "helpers" / "gpu_state_code.py"
    what = ["all"] if IS_WHOLE else []
    ended = run_compiled(program, *what, cache=tmp_path_factory.mktemp("triton"))
    found: dict[str, dict[str, Any]] = json.loads(ended.stdout)
    return found


def test_nothing_is_spilled_for_heads_of_128_and_256(kernels: Kernels) -> None:
    names = {"prepare_tokens", "multiply_keys", "mix_runs", "gate_heads", "convolve_tokens"}
    targets = {"80", "89", "90", "120"}
    assert {name.split()[0] for name in kernels} == names
    assert {name.split()[2] for name in kernels} == targets
    for name, kernel in kernels.items():
        assert kernel["spilled"] == 0, name
        assert kernel["registers"] <= MOST_REGISTERS.get(name.split()[0], 64), name
        assert kernel["shared"] <= MAX_SHARED_BYTES, name


def test_twelve_warps_of_the_recurrence_fit_a_multiprocessor(kernels: Kernels) -> None:
    for target in (80, 89, 90, 120):
        kernel = kernels[f"mix_runs 128 {target}"]
        assert kernel["threads"] == 32
        assert kernel["registers"] <= 168
        assert sum(kernel["instructions"].values()) <= 1400
