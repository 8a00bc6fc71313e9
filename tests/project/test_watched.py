"""Claims about processes that tests start and about the fuzzer: a hanging one prints its stack, targets are found."""

import subprocess
import sys
from pathlib import Path

import pytest

from watched import python_command, script_command


def test_a_process_that_hangs_says_where_and_ends() -> None:
    code = "import time\ndef wait_for_ever():\n    time.sleep(60)\nwait_for_ever()"
    done = subprocess.run(python_command(code, seconds=0.1), capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "in wait_for_ever" in done.stderr


def test_a_script_is_run_with_its_arguments_beside_its_modules(tmp_path: Path) -> None:
    (tmp_path / "neighbour.py").write_text("NAME = 'neighbour'")
    script = tmp_path / "script.py"
    script.write_text("import sys, neighbour\nprint(__name__, neighbour.NAME, *sys.argv)")
    done = subprocess.run(script_command(script, 1, "two"), capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == (f"__main__ neighbour {script} 1 two\n", "")


ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_an_input_is_tried_again_in_a_process_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "found").write_bytes(b'{"model_type": "none"}')
    command = [sys.executable, str(ROOT / "tests" / "fuzz"), "config", str(tmp_path / "found")]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
