"""The file of results: one line per row, appended when its answer ends, so that the next run knows what is done.

A run that is killed may leave half a line. This is cut off, and its row is answered again, with the same bytes.
"""

import fcntl
import json
import os
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple, final

from infer.errors import InvalidRequestError
from infer.system.atomic import replacing

_SYNC_SECONDS = 1.0  # between two syncs: after a crash of the machine, the rows of this time are answered again
_MOST_SEEDS = 64


class Finished(NamedTuple):
    """A row whose line is in the file."""

    id: str
    has_failed: bool
    line: bytes
    seed: int | None = None  # the seed of a plain row's answer


@final
class OutputFile(AbstractContextManager["OutputFile"]):
    """The file of results, which one run writes at a time. `finished` has the ids of the rows with a line.

    With `retry_errors`, the lines of failed rows are removed first. `seeds` has the seeds of some answers, by id.
    """

    def __init__(self, path: Path, model: str, *, retry_errors: bool = False) -> None:
        self.path, self._model, self._synced = path, model, time.monotonic()
        self.finished, self.seeds = set[str](), dict[str, int]()
        self.num_failed = 0
        self._file = self._open()
        try:
            self._read(retry_errors=retry_errors)
        except BaseException:
            self._file.close()
            raise

    def __exit__(self, *error: object) -> None:
        self.close()

    def write(self, line: str) -> None:
        """Append a result's line. Raises an OSError that names the file."""
        with self._naming():
            self._file.write(line.encode())
            self._file.flush()
            if time.monotonic() - self._synced > _SYNC_SECONDS:
                os.fsync(self._file.fileno())
                self._synced = time.monotonic()

    def close(self) -> None:
        """Sync and close the file. Raises an OSError that names the file."""
        if not self._file.closed:
            with self._naming():
                os.fsync(self._file.fileno())
                self._file.close()

    @contextmanager
    def _naming(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            error.filename = str(self.path)
            raise

    def _open(self) -> Any:
        if self.path.exists() and not self.path.is_file():
            raise InvalidRequestError(
                f"the output {self.path} must be a regular file, because the next run reads it: name another output"
            )
        try:
            file = self.path.open("a+b")
        except OSError as error:
            raise InvalidRequestError(f"the output {self.path} cannot be written: {error.strerror}") from error
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            file.close()
            raise InvalidRequestError(
                f"another infer batch writes {self.path}: wait until it ends, or name another output"
            ) from None
        return file

    def _read(self, *, retry_errors: bool) -> None:
        kept, has_dropped = list[bytes](), False
        for each in self._lines():
            if retry_errors and each.has_failed:
                has_dropped = True
                continue
            if retry_errors:
                kept.append(each.line)
            self.finished.add(each.id)
            if each.seed is not None and len(self.seeds) < _MOST_SEEDS:
                self.seeds[each.id] = each.seed
            self.num_failed += each.has_failed
        if has_dropped:
            self._replace(kept)

    def _lines(self) -> Iterator[Finished]:
        """Yield the rows that have a line, and cut off what follows the last whole line."""
        self._file.seek(0)
        end = 0
        for number, line in enumerate(self._file, 1):
            if not line.endswith(b"\n"):
                break
            end += len(line)
            yield self._finished(line, number)
        self._file.truncate(end)

    def _finished(self, line: bytes, number: int) -> Finished:
        record = None
        with suppress(ValueError, RecursionError):
            record = json.loads(line)
        match record:
            case {"custom_id": str(row_id), "response": None | {"body": {"model": str()}} as response, "error": error}:
                self._check_model(None if response is None else response["body"]["model"])
                return Finished(row_id, error is not None, line)
            case {"id": str(row_id), "model": str(model), **others}:
                self._check_model(model)
                seed = others.get("seed")
                return Finished(row_id, "error" in others, line, seed if isinstance(seed, int) else None)
        raise InvalidRequestError(
            f"{self.path}, line {number} was not written by infer batch: name another output, or remove it"
        )

    def _check_model(self, model: str | None) -> None:
        if model not in (None, self._model):
            raise InvalidRequestError(
                f"{self.path} holds answers of {model}, not of {self._model}: name another output, or remove it"
            )

    def _replace(self, lines: list[bytes]) -> None:
        """Replace all lines atomically: a kill leaves the old file or the new one."""
        with replacing(self.path, 0o666) as file:
            file.writelines(lines)
        self._file.close()
        self._file = self._open()
