"""The fuzzer finds its targets from any folder, even if the library for fuzzing is not installed."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_an_input_is_tried_again_in_a_process_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "found").write_bytes(b'{"model_type": "none"}')
    command = [sys.executable, str(ROOT / "tests" / "fuzz"), "config", str(tmp_path / "found")]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
