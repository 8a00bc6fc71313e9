"""Oclgrind finds no access out of bounds and no race in any OpenCL kernel. It finds a planted one of each."""

import subprocess
from pathlib import Path

import pytest

from watched import script_command

pytestmark = pytest.mark.slow

pytest.importorskip("pyopencl")


def checked(*planted: str) -> str:
    """Return the report of Oclgrind."""
    command = script_command(Path(__file__).parents[1] / "helpers" / "opencl_checked.py", *planted)
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-2000:]
    return result.stdout + result.stderr


def test_oclgrind_finds_no_access_out_of_bounds_and_no_race() -> None:
    report = checked()
    assert "Invalid" not in report
    assert "race" not in report


@pytest.mark.parametrize(("planted", "words"), [("bounds", "Invalid write"), ("race", "data race")])
def test_oclgrind_finds_planted_faults(planted: str, words: str) -> None:
    assert words in checked(planted)
