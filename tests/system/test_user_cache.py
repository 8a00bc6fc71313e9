"""Code in the cache is executed, so files of other users are refused. Folders of killed processes are removed."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from infer.errors import ModelError
from infer.files.hub.find import cache_folder
from infer.system.atomic import locked_folder
from infer.system.user_cache import base_folder, folder_problem, read_own, write_own
from watched import python_command

needs_users = pytest.mark.skipif(sys.platform == "win32", reason="hardware: a POSIX system only")
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="hardware: needs root, who can give files away")


def test_a_new_folder_is_private_at_every_step(tmp_path: Path) -> None:
    base = tmp_path / "cache"
    assert folder_problem(base / "kernels" / "0", base=base) is None
    for folder in (base, base / "kernels", base / "kernels" / "0"):
        assert folder.stat().st_mode & 0o777 == 0o700


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """Return a private folder, with private folders in it."""
    for folder in (base := tmp_path / "cache", base / "kernels", base / "kernels" / "0"):
        folder.mkdir()
        folder.chmod(0o700)
    return base


@needs_users
@pytest.mark.parametrize("inner", ["", "kernels", "kernels/0"])
@pytest.mark.parametrize("mode", [0o777, 0o1777, 0o770, 0o702])
def test_a_folder_that_others_may_write_to_is_refused(base: Path, inner: str, mode: int) -> None:
    (base / inner).chmod(mode)
    assert "can be written by others" in str(folder_problem(base / "kernels" / "0", base=base))


@needs_root
def test_a_folder_of_another_user_is_refused(base: Path) -> None:
    os.chown(base / "kernels", 12345, 12345)
    assert "belongs to user 12345" in str(folder_problem(base / "kernels" / "0", base=base))


@needs_users
def test_a_link_below_the_base_is_no_folder(tmp_path: Path) -> None:
    base, elsewhere = tmp_path / "cache", tmp_path / "elsewhere"
    base.mkdir(mode=0o700)
    elsewhere.mkdir(mode=0o700)
    (base / "kernels").symlink_to(elsewhere)
    assert "is not a folder" in str(folder_problem(base / "kernels" / "0", base=base))
    assert list(elsewhere.iterdir()) == []


UNSAFE: dict[str, Callable[[Path], object]] = {
    "pipe": os.mkfifo,
    "folder": os.mkdir,
    "endless": lambda path: path.symlink_to("/dev/zero"),
    "link": lambda path: ((path.parent / "target").write_bytes(b"content"), path.symlink_to("target")),
    "open to all": lambda path: (path.write_bytes(b"content"), path.chmod(0o666)),
    "large": lambda path: (path.write_bytes(bytes(101)), path.chmod(0o600)),
}


@needs_users
@pytest.mark.parametrize("kind", UNSAFE)
def test_an_unsafe_file_counts_as_absent(tmp_path: Path, kind: str) -> None:
    UNSAFE[kind](tmp_path / "kernel")
    assert read_own(tmp_path / "kernel", 100) is None


@needs_root
def test_a_file_of_another_user_counts_as_absent(tmp_path: Path) -> None:
    assert write_own(tmp_path / "kernel", b"content") is None
    assert read_own(tmp_path / "kernel", 100) == b"content"
    os.chown(tmp_path / "kernel", 12345, 12345)
    assert read_own(tmp_path / "kernel", 100) is None


def test_a_file_is_replaced_whole_and_nothing_is_left_beside_it(tmp_path: Path) -> None:
    for content in (b"first", b"second"):
        assert write_own(tmp_path / "kernel", content) is None
        assert read_own(tmp_path / "kernel", 100) == content
    assert [path.name for path in tmp_path.iterdir()] == ["kernel"]
    assert (tmp_path / "kernel").stat().st_mode & 0o777 == 0o600


def test_a_full_disk_is_reported_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: Path, target: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    assert "No space left" in str(write_own(tmp_path / "kernel", b"content"))
    assert list(tmp_path.iterdir()) == []


def test_the_base_follows_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("INFER_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert base_folder() == cache_folder() == tmp_path / ".cache" / "infer"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")  # its specification says that relative paths are ignored
    assert base_folder() == tmp_path / ".cache" / "infer"
    monkeypatch.setenv("XDG_CACHE_HOME", "/shared")
    assert base_folder() == Path("/shared/infer")
    monkeypatch.setenv("INFER_CACHE", "/own")
    assert base_folder() == Path("/own")


@needs_users
def test_a_user_without_a_home_has_no_cache_and_none_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import pwd

    def unknown(uid: int) -> None:
        raise KeyError(uid)

    monkeypatch.setattr(pwd, "getpwuid", unknown)
    monkeypatch.delenv("INFER_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "absent"))
    assert base_folder() is None
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setenv("HOME", "")
    assert base_folder() is None
    monkeypatch.delenv("HOME")
    assert base_folder() is None
    with pytest.raises(ModelError, match=r"no home folder .* set INFER_CACHE"):
        cache_folder()


@needs_users
def test_kernels_run_without_a_home(tmp_path: Path) -> None:
    """/etc/passwd does not name the container's user. Nothing is stored, and one line gives the reason."""
    code = """
import pwd
def unknown(uid):
    raise KeyError(uid)
pwd.getpwuid = unknown
from infer.compute.backends.cpu.isa import instruction_set
from infer.compute.backends.cpu.host import kernel_cache
print(instruction_set().name != "", kernel_cache.cache_folder(), kernel_cache.trouble())
"""
    environment = {name: value for name, value in os.environ.items() if name not in ("INFER_CACHE", "XDG_CACHE_HOME")}
    environment["HOME"] = str(tmp_path / "absent")
    done = subprocess.run(python_command(code), env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "True None there is no home folder to keep them in\n"), done.stderr


HOLDER = """
import sys, tempfile
from infer.system.atomic import locked_folder
tempfile.tempdir = sys.argv[1]
with locked_folder("infer-a-") as folder:
    (folder / "0").touch()
    print(folder, flush=True)
    sys.stdin.readline()
"""


def test_the_folder_of_a_killed_process_is_removed_by_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
