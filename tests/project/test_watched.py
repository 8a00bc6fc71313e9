"""Claims about processes that tests start: a hanging one prints its stack, and a script runs as in Python."""

import subprocess
from pathlib import Path

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
