"""Temporary folders of processes that were killed."""

import subprocess
import tempfile
from pathlib import Path

import pytest

from infer.system.files.locked_folder import locked_folder
from watched import python_command

HOLDER = """
import sys, tempfile
from infer.system.files.locked_folder import locked_folder
tempfile.tempdir = sys.argv[1]
with locked_folder("infer-a-") as folder:
    (folder / "0").touch()
    print(folder, flush=True)
    sys.stdin.readline()
"""


def test_the_folder_of_a_killed_process_is_removed_by_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    others = [tmp_path / name for name in ("infer-a-of-somebody", "infer-b-1", "infer-a-file")]
    for other in others[:2]:
        other.mkdir()
    others[2].touch()
    command = python_command(HOLDER, tmp_path)
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        held = Path(holder.stdout.readline().strip())
        with locked_folder("infer-a-") as own:
            assert (held / "0").exists()
            holder.kill()
            holder.wait()
            assert held.exists()
            with locked_folder("infer-a-") as second:
                assert not held.exists()
                assert own.exists()
                assert second != own
    assert sorted(tmp_path.iterdir()) == sorted(others)
