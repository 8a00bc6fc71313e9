"""Claims about the machine code of the kernels for experts. Triton compiles it without a GPU."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from extent import IS_WHOLE

pytest.importorskip("triton", reason="Triton is not installed")

from test_gpu_code import MOST_BARRIERS, MOST_REGISTERS, Kernels, count
from test_gpu_sampler import run_compiled


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Kernels:
    what = ["all"] if IS_WHOLE else []
    program = Path(__file__).parents[1] / "helpers" / "gpu_expert_code.py"
    found: dict[str, dict[str, Any]] = json.loads(
        run_compiled(program, *what, cache=tmp_path_factory.mktemp("triton")).stdout
    )
    return found


def test_products_of_experts_fit_the_registers_of_every_architecture(kernels: Kernels) -> None:
    for name, kernel in kernels.items():
        is_tile = name.startswith("matmul") and "gated" in name
        assert kernel["spilled"] <= (8 if is_tile else 0), name  # 8 bytes on sm_80, outside the loop
        assert kernel["registers"] <= MOST_REGISTERS.get(name.split()[0], 176), name
        if re.match("matvec|matmul|dense|add_pairs", name):
            assert kernel["has_wide_offsets"], f"{name}: an address in results or weights of gigabytes"


def test_products_of_experts_are_those_of_other_matrices(kernels: Kernels) -> None:
    for name, kernel in kernels.items():
        if name.startswith("matvec"):
            assert count(kernel, "dp4a", "loop") == 32, name
            assert count(kernel, r"bar\.", "loop") <= (MOST_BARRIERS if "gated" in name else 0), name
        elif name.startswith("matmul"):
            assert count(kernel, r"(wgmma\.mma_async|mma)\.sync\S*k32\S*\.s8", "loop") >= 8, name
            assert count(kernel, r"cp\.async\.c[ag]\.shared\.global", "loop") >= 8, name
            assert sum(kernel["loop"].values()) <= 1400, name
        elif name.startswith("dense"):
            family = r"wgmma\.mma_async\.\S*k16" if name.endswith("90") else r"mma\.sync\.\S*m16n8k16"
            assert count(kernel, family, "loop") > 0, name
            assert count(kernel, r"cp\.async\.c[ag]\.shared\.global", "loop") >= 4, name
            assert sum(kernel["loop"].values()) <= 240, name  # 64 inputs


def test_the_choice_of_experts_is_one_short_program_for_a_token(kernels: Kernels) -> None:
    assert sum(kernels["choose_experts 90"]["instructions"].values()) <= 300
