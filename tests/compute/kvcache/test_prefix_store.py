"""Pages in files: a page that is found has its stored content, the budget is kept, and processes may die any time."""

import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from infer.compute.kvcache import prefix_store
from infer.compute.kvcache.prefix_store import PageName, PrefixStore, PrefixStoreError, open_store
from infer.system import user_cache

PAGE = 5000  # bytes, which take two blocks on disk
ON_DISK = 8192


def name_of(number: int, group: int = 0) -> PageName:
    return PageName(group, number.to_bytes(16, "little"))


def content_of(name: PageName) -> bytes:
    return (name.key * PAGE)[:PAGE]


def open_in(folder: Path, max_bytes: int = 1 << 20, fingerprint: str = "ours") -> PrefixStore:
    folder.mkdir(mode=0o700, exist_ok=True)
    return PrefixStore(folder, fingerprint, max_bytes)


def write(store: PrefixStore, *numbers: int) -> bool:
    """Write pages, and return True if the last of them was stored."""
    return [store.write(name_of(number), content_of(name_of(number))) for number in numbers][-1]


def num_bytes_in(folder: Path) -> int:
    """Return the bytes of files on disk. Other processes may remove some meanwhile."""
    total = 0
    for file in folder.glob("*/*"):
        with suppress(FileNotFoundError):
            total += file.stat().st_blocks * 512
    return total


def test_a_stored_page_is_found_by_its_name_and_by_another_process(tmp_path: Path) -> None:
    first, name = open_in(tmp_path / "prefixes"), name_of(1)
    assert name not in first
    assert first.read(name, PAGE) is None
    assert first.write(name, content_of(name))
    assert not first.write(name, content_of(name))  # the page is already stored
    second = open_in(tmp_path / "prefixes")
    assert name in second
    assert second.read(name, PAGE) == content_of(name)
    assert name_of(1, group=1) not in second


def test_a_changed_file_is_removed_and_never_used(tmp_path: Path) -> None:
    store = open_in(tmp_path / "prefixes")

    def path_of(name: PageName) -> Path:
        return tmp_path / "prefixes" / "ours" / str(name)

    def flip(path: Path) -> None:
        content = bytearray(path.read_bytes())
        content[random.Random(0).randrange(len(content))] ^= 1
        path.write_bytes(content)

    other = open_in(tmp_path / "prefixes", fingerprint="another")
    stranger = open_in(tmp_path / "stranger")  # the same model for another user, whose secret differs
    cases = {
        "damaged": flip,
        "truncated": lambda path: os.truncate(path, 100),
        "longer": lambda path: path.write_bytes(path.read_bytes() + b"x"),
        "empty": lambda path: os.truncate(path, 0),
        "swapped": lambda path: path.write_bytes(path_of(name_of(99)).read_bytes()),
        "of another model": lambda path: path.write_bytes((tmp_path / "prefixes/another" / path.name).read_bytes()),
        "forged": lambda path: path.write_bytes((tmp_path / "stranger/ours" / path.name).read_bytes()),
        "a link": lambda path: (path.unlink(), path.symlink_to(path_of(name_of(99)))),
        "a folder": lambda path: (path.unlink(), path.mkdir()),
    }
    write(store, 99)
    for number, (case, harm) in enumerate(cases.items()):
        name = name_of(number)
        for each in (store, other, stranger):
            each.write(name, content_of(name))
        harm(path_of(name))
        with pytest.raises(PrefixStoreError, match=r"its tokens are read again"):
            store.read(name, PAGE)
        assert case == "a folder" or name not in store
    assert store.read(name_of(99), PAGE) == content_of(name_of(99))


def test_the_budget_holds_for_all_models_and_the_pages_used_longest_ago_go_first(tmp_path: Path) -> None:
    most = 10 * ON_DISK
    ours, theirs = open_in(tmp_path, most), open_in(tmp_path, most, fingerprint="theirs")
    for number in range(10):
        store = theirs if number % 2 else ours
        write(store, number)
        os.utime(tmp_path / ("theirs" if number % 2 else "ours") / str(name_of(number)), (number, number))
    assert num_bytes_in(tmp_path) == most
    ours.touch(name_of(0), depth=0)  # this page is used now
    for number in range(10, 40):
        write(ours, number)
        assert num_bytes_in(tmp_path) <= most
        if number < 18:
            assert name_of(0) in ours
    assert name_of(39) in ours
    assert not any(name_of(number) in theirs for number in range(10))
    assert not ours.write(name_of(50), bytes(most))  # larger than the budget
    os.utime(tmp_path / "ours" / str(name_of(39)), (1 << 32, 1 << 32))
    assert open_in(tmp_path, 2 * ON_DISK).read(name_of(39), PAGE) is not None  # a smaller budget, from the start
    assert num_bytes_in(tmp_path) <= 2 * ON_DISK


def test_a_new_model_s_first_page_is_stored_when_the_budget_is_full(tmp_path: Path) -> None:
    most = 4 * ON_DISK
    ours = open_in(tmp_path, most)
    write(ours, *range(4))
    theirs = open_in(tmp_path, most, fingerprint="theirs")
    assert write(theirs, 9)
    assert name_of(9) in theirs
    assert num_bytes_in(tmp_path) <= most


def test_a_page_that_cannot_be_written_gives_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_in(tmp_path)
    full = SimpleNamespace(f_bavail=100, f_frsize=4096)
    with monkeypatch.context() as patched:
        patched.setattr(os, "statvfs", lambda path: full)
        with pytest.raises(PrefixStoreError, match="less than 1 GB free"):
            write(store, 1)

    def fail(*arguments: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "replace", fail)
        with pytest.raises(PrefixStoreError, match="cannot be written: No space left on device"):
            write(store, 1)
    assert name_of(1) not in store
    assert not list(tmp_path.glob("*/*"))
    monkeypatch.setattr(prefix_store, "is_writable", lambda folder: False)
    assert "cannot be written" in str(open_in(tmp_path).problem)
    monkeypatch.setenv("INFER_CACHE", str(tmp_path / "cache"))
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache").chmod(0o777)
    assert "can be written by others" in str(open_store("ours", 1 << 20))


@pytest.mark.parametrize("damage", [b"", b"x" * 40, b"-1"])
def test_a_damaged_account_or_secret_is_made_again(damage: bytes, tmp_path: Path) -> None:
    store = open_in(tmp_path)
    write(store, 1)
    (tmp_path / "account").write_bytes(damage)
    write(store, 2)
    assert store.read(name_of(1), PAGE) is not None
    assert int((tmp_path / "account").read_text()) == 2 * ON_DISK
    (tmp_path / "secret").write_bytes(damage)
    again = open_in(tmp_path)
    with pytest.raises(PrefixStoreError, match="damaged"):  # it was stored with the lost secret
        again.read(name_of(1), PAGE)
    write(again, 1)
    assert open_in(tmp_path).read(name_of(1), PAGE) == content_of(name_of(1))


def test_a_page_and_a_secret_that_another_process_writes_meanwhile_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first read of each file finds none, and by the next look another process has written it."""
    store = open_in(tmp_path)
    write(store, 1)
    misses = {"secret", str(name_of(1))}

    def read_own(path: Path, most_bytes: int) -> bytes | None:
        if path.name in misses:
            misses.remove(path.name)
            return None
        return user_cache.read_own(path, most_bytes)

    monkeypatch.setattr(prefix_store, "read_own", read_own)
    assert open_in(tmp_path).read(name_of(1), PAGE) == content_of(name_of(1))
    assert not misses


_WRITER = """
import sys, random
from pathlib import Path
from infer.compute.kvcache.prefix_store import PageName, PrefixStore
from infer.system import user_cache
folder, max_bytes, seed, PAGE = sys.argv[1], *map(int, sys.argv[2:])
store, generator = PrefixStore(Path(folder), "ours", max_bytes), random.Random(seed)
print("ready", flush=True)
while True:
    name = PageName(0, generator.randrange(200).to_bytes(16, "little"))
    content = (name.key * PAGE)[:PAGE]
    if (found := store.read(name, PAGE)) is None:
        store.write(name, content)
    else:
        assert found == content
"""


def test_processes_that_share_a_folder_and_are_killed_leave_whole_pages_within_the_budget(tmp_path: Path) -> None:
    most, delays = 100 * ON_DISK, random.Random(1)

    @contextmanager
    def started(seed: int) -> Iterator["subprocess.Popen[str]"]:
        """Start a process, and kill it at the end, also after a failure."""
        command = [sys.executable, "-c", _WRITER, *map(str, (tmp_path, most, seed, PAGE))]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            try:
                assert process.stdout is not None
                assert process.stdout.readline() == "ready\n"
                yield process
            finally:
                process.kill()

    with started(0) as steady:
        for seed in range(1, 9):
            with started(seed):
                time.sleep(delays.uniform(0, 0.1))
                assert num_bytes_in(tmp_path) <= most + ON_DISK  # with a file that is being written
                while len(list(tmp_path.glob("ours/*"))) <= 6 * seed and steady.poll() is None:
                    time.sleep(0.01)
        assert steady.poll() is None, "it found what was not stored"
    store = open_in(tmp_path, most)
    assert num_bytes_in(tmp_path) <= most
    assert not list(tmp_path.glob("*/*.partial"))
    found = [name for number in range(200) if (name := name_of(number)) in store]
    assert len(found) > 40
    assert all(store.read(name, PAGE) == content_of(name) for name in found)
