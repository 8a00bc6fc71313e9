"""Prefixes of prompts on disk: loaded before a prompt enters, and stored while answers are generated.

One thread reads and writes the files. It reaches the cache by calls to the engine's thread, each of which copies a few
pages between two steps. Pages that cannot be read are computed, and pages that cannot be written are not stored. So
disk errors never fail an answer. Prefixes are used only if the values that a cache stores have the same fingerprint.
"""

import hashlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, final

import torch

from infer.compute.kvcache.page_exchange import PageExchange
from infer.compute.kvcache.page_rows import page_keys
from infer.compute.kvcache.paged import PagedCache
from infer.compute.kvcache.prefix_store import PageName, PrefixStore, PrefixStoreError
from infer.engine.runner.runner import Runner
from infer.errors import ClosedError
from infer.system.cores import start_thread

_SLICE_BYTES = 16 << 20  # copied between two steps, which takes about 5 ms
_REST_SECONDS = 60  # pause after pages could not be written
# After a page was stored during answers, pause this many times as long, so answers lose at most 1/100.
_REST_FACTOR = 100
_FLUSH_SECONDS = 2  # to write the remaining pages when the model is closed

OnEnd = Callable[[int | None], None]
log = logging.getLogger("infer.server")
# Packages whose code computes the values, or reads the weights that they are computed from.
PACKAGES = (
    "infer.compute.backends",
    "infer.files",
    "infer.compute.kvcache",
    "infer.models",
    "infer.compute.operands",
    "infer.compute.ops",
    "infer.compute.quantization",
    "infer.engine.runner",
    "infer.engine.tensor_parallel",
)
WITHOUT_VALUES = ("infer.models.catalog", "infer.models.gguf_export")  # they only read models and write files
_SUFFIXES = (".py", ".cl")
_LIBRARIES = ("torch", "numpy", "numba", "llvmlite", "triton")


@final
class PrefixDisk:
    """Loads and stores pages. `begin` and `notify` are for the engine's thread, the other methods for any thread."""

    def __init__(self, store: PrefixStore, cache: PagedCache, call: Callable[..., Callable[[], Any]]) -> None:
        """Start the thread. `call(function, *arguments)` calls a function on the engine's thread.

        It returns a function that waits for the result, and raises ClosedError if that thread has ended, which also
        ends this thread. The engine sets `is_busy`, which is True while answers are computed, and `seconds_to_compute`,
        which returns how long it takes to compute the tokens from a position on, or 0 if that is unknown.
        """
        self._store, self._exchange, self._call = store, PageExchange(cache), call
        self._page_tokens = cache.settings.page_tokens
        self._loads = deque[tuple[Iterator[bool], OnEnd]]()  # of prompts that are about to enter
        self._changed = threading.Condition()
        self._is_closed = self._is_idle = False
        self._rests_until = 0.0
        self._problems = set[str]()  # that were logged
        self._rest_seconds = 0.0  # before the next page is stored while answers are computed
        self.is_busy: Callable[[], bool] = lambda: False
        self.seconds_to_compute: Callable[[int, int], float] = lambda num_tokens, start: 0.0
        self.bytes_stored = self.files_refused = 0  # since the model was loaded, for any thread
        if store.problem is not None:
            self._tell(store.problem)
        thread = threading.Thread(target=self._serve, name="infer-prefixes", daemon=True)
        start_thread(thread, blocks_signals=True)

    @property
    def folder(self) -> Path:
        """The folder of all models' pages."""
        return self._store.folder

    def begin(self, token_ids: Sequence[int], salt: bytes, is_wanted: Callable[[], bool], on_end: OnEnd) -> bool:
        """Begin to load the pages of a prompt that are not in memory. Return False if all are, and after `close`.

        `is_wanted` returns False once the prompt's answer has ended. `on_end` is called on the engine's thread when all
        pages that can be loaded are in memory. Its argument is the number of tokens that were in memory before, or None
        if no page was loaded.
        """
        keys = page_keys(token_ids[:-1], self._page_tokens, salt=salt)
        num_in_memory = self._exchange.num_in_memory(keys)
        if num_in_memory == len(keys):
            return False
        with self._changed:
            if self._is_closed:
                return False
            self._loads.append((self._load(keys, num_in_memory * self._page_tokens, is_wanted, on_end), on_end))
            self._changed.notify_all()
        return True

    def notify(self) -> None:
        """Store the pages that were computed since the last call."""
        if self._exchange.new_pages:
            with self._changed:
                self._is_idle = False
                self._changed.notify_all()

    def flush(self) -> None:
        """Wait, at most a few seconds, until all computed pages are stored. Not for the engine's thread."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed or self._is_idle, _FLUSH_SECONDS)

    def close(self) -> None:
        """End the thread soon. Does not wait."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    # Its thread

    def _serve(self) -> None:
        try:
            while self._wait():
                if not self._loads:
                    self._store_some()
                elif next(self._loads[0][0], True):
                    self._loads.popleft()
                else:
                    self._loads.rotate(-1)  # the next load's turn
        except ClosedError:
            pass
        except Exception:
            log.exception("prefixes of prompts are no longer stored: this is a fault of infer")
        self.close()
        with suppress(ClosedError):
            while self._loads:  # end every load, so that no prompt waits forever
                self._call(self._loads.popleft()[1], None)()

    def _wait(self) -> bool:
        """Wait for work, and rest between pages while answers are computed. Return False at the end."""
        with self._changed:
            self._is_idle = not (self._loads or self._exchange.new_pages)
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._is_closed or self._loads or not self.is_busy(), self._rest_seconds)
            self._rest_seconds = 0.0
            self._changed.wait_for(lambda: self._is_closed or self._loads or self._exchange.new_pages)
            return not self._is_closed

    def _load(
        self, keys: Sequence[bytes], num_in_memory: int, is_wanted: Callable[[], bool], on_end: OnEnd
    ) -> Iterator[bool]:
        """Load the pages of a prompt, some per `next`, and yield True after the last.

        Pages are copied while the next ones are read.
        """
        names, seconds, num_loaded, is_over = self._find(keys), 0.0, 0, False
        copying: Callable[[], Any] | None = None

        def put(contents: Sequence[tuple[PageName, memoryview]], is_last: bool) -> None:
            """Copy pages into the cache, and call `on_end` after the last. For the engine's thread."""
            nonlocal num_loaded, is_over
            for name, content in contents:
                if not (is_wanted() and self._exchange.put(name, content)):
                    is_last = True
                    break
                num_loaded += 1
            num_tokens = num_loaded * self._page_tokens // self._exchange.num_groups
            if not is_last and 0 < self.seconds_to_compute(num_tokens, num_in_memory) < seconds:
                self._tell(f"reading {self._store.folder} takes longer than computing prompts")
                is_last = True
            if is_last:
                is_over = True
                on_end(num_in_memory if num_loaded else None)

        while True:
            began = time.perf_counter()
            contents = self._read_some(names)
            seconds += time.perf_counter() - began
            if copying is not None:
                copying()
            if is_over:
                return
            copying = self._call(put, contents, not names)
            if not names:
                copying()
            yield is_over

    def _find(self, keys: Sequence[bytes]) -> deque[PageName]:
        """Return the stored pages with these keys that are not in memory."""
        stored = set[PageName]()
        for depth, key in enumerate(keys):
            for name in self._names(key):
                if name in self._store:
                    self._store.touch(name, depth)
                    stored.add(name)
        return deque(self._call(self._exchange.missing, keys, stored)() if stored else ())

    def _names(self, key: bytes) -> list[PageName]:
        return [PageName(group, key) for group in range(self._exchange.num_groups)]

    def _read_some(self, names: deque[PageName]) -> list[tuple[PageName, memoryview]]:
        """Return the contents of some of the next pages. There are no further names after one that cannot be read."""
        contents, num_bytes = list[tuple[PageName, memoryview]](), 0
        while names and num_bytes < _SLICE_BYTES:
            if (content := self._read(name := names.popleft())) is None:
                names.clear()
                break
            contents.append((name, content))
            num_bytes += len(content)
        return contents

    def _read(self, name: PageName) -> memoryview | None:
        """Return a stored page, or None if it cannot be used, or if another process has removed it."""
        try:
            return self._store.read(name, self._exchange.page_bytes(name.group))
        except PrefixStoreError as error:
            self.files_refused += 1
            log.warning("%s", error)
        except OSError as error:
            self._tell(f"{self._store.folder} cannot be read ({error.strerror})")
        return None

    def _store_some(self) -> None:
        """Store some of the new pages. While answers are computed, store one page per group, and rest afterwards."""
        began, most_bytes = time.perf_counter(), 1 if self.is_busy() else _SLICE_BYTES
        new_pages, wanted, num_bytes = self._exchange.new_pages, list[PageName](), 0
        if time.monotonic() < self._rests_until or self._store.problem is not None:
            new_pages.clear()
        while new_pages and num_bytes < most_bytes:
            for name in self._names(new_pages.popleft()):
                if name not in self._store:
                    wanted.append(name)
                    num_bytes += self._exchange.page_bytes(name.group)
        for name, content in self._call(self._copies, wanted)() if wanted else ():
            try:
                if self._store.write(name, content):
                    self.bytes_stored += len(content)
            except PrefixStoreError as error:
                self._rests_until = time.monotonic() + _REST_SECONDS
                self._tell(str(error))
                return
        if wanted:
            self._rest_seconds = _REST_FACTOR * (time.perf_counter() - began)

    def _copies(self, names: Sequence[PageName]) -> list[tuple[PageName, bytes]]:
        """Return the contents of the pages that are still in memory. For the engine's thread."""
        copies = [(name, self._exchange.copy(name)) for name in names]
        return [(name, content) for name, content in copies if content is not None]

    def _tell(self, problem: str) -> None:
        """Log a problem once."""
        if problem not in self._problems:
            self._problems.add(problem)
            log.warning("prefixes of prompts are not stored on disk: %s", problem)


def prefix_fingerprint(model: dict[str, str], runner: Runner) -> str:
    """Return the fingerprint of the values in the runner's cache, as 32 hexadecimal digits.

    `model` is `Host.fingerprint`: weights, architecture, tokenizer, storage format. The layout of a page is included,
    but not the number of pages, which depends on the free memory. The device, the code and its libraries are included
    as well, because another kernel may compute other bits.
    """
    cache, device = runner.cache, runner.model.device
    layout = [(rows.group.layers, cache.memory.page_bytes(rows), cache.settings.page_tokens) for rows in cache.groups]
    machine = device.type, runner.model.backend.instruction_set(), torch.backends.cpu.get_cpu_capability()
    identity = repr((sorted(model.items()), layout, machine, _code()))
    return hashlib.blake2b(identity.encode(), digest_size=16).hexdigest()


@cache
def _code() -> str:
    """Return a digest of the code that computes keys and values."""
    digest = hashlib.blake2b(digest_size=16)
    for name, path in sources().items():
        digest.update(name.encode() + b"\0" + path.read_bytes())
    return f"{digest.hexdigest()} {[_version(name) for name in _LIBRARIES]}"


def sources() -> dict[str, Path]:
    """Return the files of the code that computes keys and values, by package and path within it, in order.

    Raises ModuleNotFoundError if a package is missing or empty.
    """
    files: dict[str, Path] = {}
    for package in PACKAGES:
        folders = getattr(find_spec(package), "submodule_search_locations", None) or ()
        paths = {
            f"{package}/{path.relative_to(folder).as_posix()}": path
            for folder in folders
            for path in Path(folder).rglob("*")
            if path.suffix in _SUFFIXES and f"{package}.{path.relative_to(folder).parts[0]}" not in WITHOUT_VALUES
        }
        if not paths:
            raise ModuleNotFoundError(f"{package} has no sources, so prefixes on disk cannot name it", name=package)
        files.update(sorted(paths.items()))
    return files


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""
