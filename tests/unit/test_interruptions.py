"""A signal's exception wherever one may come: the next call works. In child processes, as what fails is a hang."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("interrupted.py")


def run(*arguments: str | Path) -> None:
    """It ends itself, and says where it is, when one of its cases hangs for a minute."""
    done = subprocess.run(
        [sys.executable, "-W", "error", SCRIPT, *arguments], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]


def test_after_an_exception_at_any_place_of_a_walk_the_next_one_is_right() -> None:
    run("walks")


def test_after_alarms_at_any_moment_of_a_walk_the_next_one_is_right() -> None:
    run("alarms", "300")


def test_after_an_exception_in_a_generation_the_next_one_gives_the_same_tokens(folder: Path) -> None:
    run("generations", folder, "24", "3")


@pytest.mark.parametrize("names", ["send,stream,generate", "append,rewind,fork,save,close"])
def test_after_an_exception_in_a_call_of_a_session_it_goes_on(names: str, folder: Path) -> None:
    run("sessions", folder, names, "16", "3")


def test_after_an_exception_at_any_place_of_a_load_the_session_goes_on(folder: Path) -> None:
    """Few places leave the cache of one conversation beside the ids of another: all are tried."""
    run("sessions", folder, "load", "1000000", "0")
