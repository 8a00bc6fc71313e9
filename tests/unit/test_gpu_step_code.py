"""Claims about the machine code of attention and of what stands around it. Triton compiles it without a GPU."""

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
    """By kernel, kv type, size of heads and architecture. AMD's have compiled, too."""
    what = ["all"] if IS_WHOLE else []
    done = run_compiled(HERE / "gpu_step_kernels.py", *what, cache=tmp_path_factory.mktemp("triton"))
    kernels: dict[str, Any] = json.loads(done.stdout)
    return kernels


def test_nothing_is_spilled_on_any_architecture(code: dict[str, Any]) -> None:
    assert {name.split()[3] for name in code if name.startswith("attend")} == {"80", "89", "90", "120"}
    for name, kernel in code.items():
        assert kernel["spilled"] == 0, name
        assert kernel["registers"] <= (250 if name.startswith("attend") else 96), name


def test_blocks_of_the_cache_are_read_in_wide_words(code: dict[str, Any]) -> None:
    for name, kernel in code.items():
        if name.startswith("attend"):
            wide = sum(count for each, count in kernel["instructions"].items() if re.match(r"LDG\.E\.128", each))
            assert wide >= 4, name  # of keys, of values and of queries


def test_a_multi_step_advances_in_one_warp_without_a_barrier(code: dict[str, Any]) -> None:
    assert not any(name.startswith("BAR") for name in code["advance 90"]["instructions"])
