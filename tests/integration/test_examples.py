"""The examples run as a reader would run them, and say what they promise."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
MAX_LINES = 30

# What each program's stdout must contain, as a regular expression.
PROMISES = {
    "generate.py": r"\w+ \w+",
    "stream.py": r"\w+ \w+",
    "chat.py": r"> What is the capital of France\?\n.*Paris",
    "logits.py": r"perplexity \d+\.\d\d over \d+ tokens",
    "custom_loop.py": r"Once upon a time\W+\w+",
}


def test_every_example_is_run_and_short() -> None:
    programs = sorted(EXAMPLES.glob("*.py"))
    assert [program.name for program in programs] == sorted(PROMISES)
    for program in programs:
        assert len(program.read_text(encoding="utf-8").splitlines()) < MAX_LINES, program.name


@pytest.mark.parametrize("name", sorted(PROMISES))
def test_the_example_keeps_its_promise(name: str, smollm2_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name), str(smollm2_path)],
        capture_output=True,
        text=True,
        check=False,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0, done.stderr
    assert re.search(PROMISES[name], done.stdout), done.stdout
    assert "Traceback" not in done.stderr
