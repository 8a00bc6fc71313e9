"""Claims about the machine code of the kernels that read weights. Triton compiles it without a GPU."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from extent import IS_WHOLE

pytest.importorskip("triton", reason="Triton is not installed")

from test_gpu_sampler import run_compiled

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def code(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """By kernel, type and architecture. AMD's have compiled, too."""
    what = "all" if IS_WHOLE else "weights"
    done = run_compiled(HERE / "gpu_compiler.py", what, cache=tmp_path_factory.mktemp("triton"))
    kernels: dict[str, Any] = json.loads(done.stdout)
    return kernels


def count(kernel: dict[str, Any], pattern: str) -> int:
    return sum(times for name, times in kernel["instructions"].items() if re.match(pattern, name))


def test_nothing_is_spilled_and_addresses_have_64_bits(code: dict[str, Any]) -> None:
    for name, kernel in code.items():
        assert kernel["spilled"] == 0, name
        assert kernel["has_wide_offsets"], name


def test_a_matvec_streams_wide_words_into_integer_products_without_a_barrier(code: dict[str, Any]) -> None:
    kernels = {name: kernel for name, kernel in code.items() if name.startswith("matvec")}
    assert len(kernels) >= 16
    for name, kernel in kernels.items():
        rows = 4 if "gated" in name else 2
        assert count(kernel, r"IDP\.4A") == rows * 16, name  # 8 words of 4 inputs, in two planes
        wide = 4 if "Q2_K" in name or "Q3_K" in name else 5  # of activations, and of codes but those of 2 bits
        assert count(kernel, r"LDG\.E\.128") >= rows * wide, name
        assert kernel["loop_barriers"] == 0, name
        assert kernel["registers"] <= 96, name


def test_products_of_many_tokens_are_made_by_tensor_cores(code: dict[str, Any]) -> None:
    for name, kernel in code.items():
        if name.startswith("matmul"):
            assert count(kernel, "IMMA|IGMMA") > 0, name
        elif name.startswith("dense F32"):
            assert count(kernel, "FFMA") > 0, name
        elif name.startswith("dense"):
            assert count(kernel, "HMMA|HGMMA") > 0, name
            assert count(kernel, r"LDG(STS)?\.E\.(BYPASS\.)?128") > 0, name
        if name.startswith(("matmul", "dense")):
            assert kernel["loop_barriers"] <= 6, name
