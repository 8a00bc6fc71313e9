"""Pages of prompts in files, which processes share, and which outlive these processes. Loads no torch.

A file has one page of one group of layers, after a keyed digest of the model's fingerprint, the page's name and its
content. The key of the digest is a secret file of this user. So a file that is damaged, cut, renamed, forged or from
another model is not used, and is removed.

All models of a user share one budget. A lock is held while a file is written. The account of bytes is raised before a
file is written, so it is never less than the size of the files.
"""

import fcntl
import hmac
import os
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple, final

from infer.system.user_cache import base_folder, folder_problem, is_writable, read_own, write_own

_DIGEST_BYTES = _SECRET_BYTES = 32
_BLOCK_BYTES = 4096  # block of the file system: a file uses whole blocks
_SPARE_BYTES = 1 << 30  # of the disk that stay free
_ROOM = 0.9  # a full budget is reduced to this share
_TOUCH_SECONDS = 60
_SECRET, _ACCOUNT, _LOCK = "secret", "account", "lock"


class PageName(NamedTuple):
    """A page of a group of layers. `key` depends on the page's tokens, all tokens before them, and the salt."""

    group: int
    key: bytes

    def __str__(self) -> str:
        return f"{self.key.hex()}.{self.group}"


class _Found(NamedTuple):
    """A stored file."""

    last_used: float
    num_bytes: int
    path: str


class PrefixStoreError(Exception):
    """The reason why a page cannot be stored, in one line."""


@final
class PrefixStore:
    """The stored pages of one model. One thread uses it; other processes may use the same folder."""

    def __init__(self, folder: Path, fingerprint: str, max_bytes: int) -> None:
        """Use the files in `folder`, which `open_store` has made, for the model with this fingerprint.

        All files in `folder`, of all models together, have at most `max_bytes`. Raises OSError if the folder has no
        secret and none can be written.
        """
        self._root, self._folder, self._max_bytes = folder, folder / fingerprint, max_bytes
        self._fingerprint = fingerprint.encode()
        self._secret = _read_secret(folder)
        self.problem: str | None = None if is_writable(folder) else f"{folder} cannot be written"
        if self.problem is None:
            with _locked(self._root):
                self._account(self._shrink(0, max_bytes))

    @property
    def folder(self) -> Path:
        """The folder of all models' pages."""
        return self._root

    def __contains__(self, name: PageName) -> bool:
        return (self._folder / str(name)).exists()

    def read(self, name: PageName, num_bytes: int) -> memoryview | None:
        """Return a stored page of `num_bytes`, or None if it is not stored.

        Raises PrefixStoreError if the file was changed. It is then removed.
        """
        path = self._folder / str(name)
        content, problem = self._read(path, name, num_bytes)
        if problem:
            with suppress(OSError), _locked(self._root):  # another process may have removed and written it meanwhile
                content, problem = self._read(path, name, num_bytes)
                if problem:
                    path.unlink()
        if problem:
            raise PrefixStoreError(f"{path} {problem}; it was removed, and its tokens are read again")
        return content

    def _read(self, path: Path, name: PageName, num_bytes: int) -> tuple[memoryview | None, str]:
        """Return a stored page, or None, and the problem of the file, or ""."""
        stored = read_own(path, _DIGEST_BYTES + num_bytes + 1)
        if stored is None and not path.exists():
            return None, ""
        content = memoryview(stored or b"")[_DIGEST_BYTES:]
        if stored is None or len(content) != num_bytes:
            return None, "has another size or owner"
        if not hmac.compare_digest(stored[:_DIGEST_BYTES], self._digest(name, content)):
            return None, "is damaged: its digest differs"
        return content, ""

    def touch(self, name: PageName, depth: int) -> None:
        """Note that a stored page was used. Among pages used together, those with a larger depth are removed first."""
        path = self._folder / str(name)
        now = time.time() - depth / 1000
        with suppress(OSError):
            if path.stat().st_mtime < now - _TOUCH_SECONDS:
                os.utime(path, (now, now))

    def write(self, name: PageName, content: bytes) -> bool:
        """Store a page. If the budget needs it, remove the least recently used pages.

        Return False if it is already stored, or needs more than most of the budget.

        Raises PrefixStoreError if nothing can be stored now: the disk is full, or the folder is read-only.
        """
        num_bytes = _size_on_disk(_DIGEST_BYTES + len(content))
        if num_bytes > self._max_bytes * _ROOM:
            return False
        digest = self._digest(name, content)
        try:
            with _locked(self._root):
                if name in self:
                    return False
                total = self._total()
                if total is None or total + num_bytes > self._max_bytes:
                    total = self._shrink(num_bytes, int(self._max_bytes * _ROOM))
                disk = os.statvfs(self._root)
                if disk.f_bavail * disk.f_frsize < num_bytes + _SPARE_BYTES:
                    raise PrefixStoreError(f"the disk of {self._root} has less than 1 GB free")
                self._account(total + num_bytes)
                self._folder.mkdir(mode=0o700, exist_ok=True)
                self._write(self._folder / str(name), digest, content)
                return True
        except OSError as error:
            raise PrefixStoreError(f"{self._root} cannot be written: {error.strerror}") from error

    def _write(self, path: Path, digest: bytes, content: bytes) -> None:
        """Write a file, which appears as a whole. A file that a power failure left incomplete has a wrong digest."""
        partial = path.with_suffix(".partial")
        try:
            descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            with open(descriptor, "wb") as file:
                file.write(digest)
                file.write(content)
            partial.replace(path)
        except OSError:
            partial.unlink(missing_ok=True)
            raise

    def _digest(self, name: PageName, content: bytes | memoryview) -> bytes:
        digest = hmac.new(self._secret, self._fingerprint + str(name).encode(), "sha256")
        digest.update(content)
        return digest.digest()

    def _total(self) -> int | None:
        """Return the account, which is at least the number of bytes of the files, or None if it cannot be read."""
        text = read_own(self._root / _ACCOUNT, 32)
        return int(text) if text is not None and text.isdigit() else None

    def _account(self, total: int) -> None:
        (self._root / _ACCOUNT).write_text(f"{total}")

    def _shrink(self, num_needed: int, most: int) -> int:
        """Remove the least recently used pages until the rest and `num_needed` fit in `most` bytes. Return the rest.

        Also removes files that a killed process left. The lock must be held.
        """
        found = sorted(self._scan())
        total = sum(each.num_bytes for each in found)
        for each in found:
            if total + num_needed <= most:
                break
            with suppress(FileNotFoundError):
                os.unlink(each.path)
            total -= each.num_bytes
        return total

    def _scan(self) -> Iterator[_Found]:
        """Yield all stored pages of all models."""
        for folder in os.scandir(self._root):
            if not folder.is_dir(follow_symlinks=False):
                continue
            for file in os.scandir(folder):
                with suppress(FileNotFoundError):
                    if file.name.endswith(".partial"):
                        os.unlink(file.path)
                        continue
                    stat = file.stat(follow_symlinks=False)
                    yield _Found(stat.st_mtime, _size_on_disk(stat.st_size), file.path)
            with suppress(OSError):
                os.rmdir(folder)  # succeeds only if it is empty


def open_store(fingerprint: str, max_bytes: int) -> PrefixStore | str:
    """Return the store in this user's cache folder, or one line that explains why there is none."""
    base = base_folder()
    if base is None:
        return "there is no home folder to store them in"
    folder = base / "prefixes"
    if (problem := folder_problem(folder, base=base)) is not None:
        return problem
    try:
        return PrefixStore(folder, fingerprint, max_bytes)
    except OSError as error:
        return f"{folder} cannot be used ({error.strerror})"


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the folder's lock within the context. Raises OSError."""
    descriptor = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _read_secret(folder: Path) -> bytes:
    """Return the secret of the folder. Make one if there is none. Raises OSError."""
    path = folder / _SECRET
    if (secret := _valid_secret(path)) is None:
        with _locked(folder):  # else another process may write one now, and its pages would be lost
            if _valid_secret(path) is None and (error := write_own(path, secrets.token_bytes(_SECRET_BYTES))):
                raise error
        if (secret := _valid_secret(path)) is None:
            raise OSError(0, "its secret cannot be read")
    return secret


def _valid_secret(path: Path) -> bytes | None:
    secret = read_own(path, _SECRET_BYTES + 1)
    return secret if secret is not None and len(secret) == _SECRET_BYTES else None


def _size_on_disk(num_bytes: int) -> int:
    return -(-num_bytes // _BLOCK_BYTES) * _BLOCK_BYTES
