"""Claims about files that change or fail while they are read: one line, and the process continues."""

import errno
import gc
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch

from hostile_files import write_folder, write_gguf
from infer.compute.backends.cpu.weights.packed_weight import Pieces
from infer.engine.session.session_file import read_session, write_session
from infer.errors import InvalidRequestError, ModelError, ModelFormatError
from infer.files import open_checkpoint
from infer.models.from_checkpoint import load_model
from infer.models.transformer import Transformer
from infer.system.json_limits import read_json_file
from infer.system.open_file import OpenFile
from refusals import check_refused, refusal

CASES = [  # options, and the number of remaining bytes
    ({"dtype": "auto"}, 0),
    ({"weights": "q8"}, 20_000),
    pytest.param({"dtype": "bfloat16"}, 12_000, marks=pytest.mark.slow),
    pytest.param({"weights": "q4"}, 100, marks=pytest.mark.slow),
    pytest.param({"precision": "fast"}, 30_000, marks=pytest.mark.slow),
]
Read = Callable[[int, Sequence[memoryview], int], int]
preadv: Read = os.preadv


@pytest.fixture(params=["folder", "gguf"])
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return write_folder(tmp_path / "model") if request.param == "folder" else write_gguf(tmp_path / "model.gguf")


def weights_file(model: Path) -> Path:
    return model / "model.safetensors" if model.is_dir() else model


def state_of(model: Transformer) -> Iterator[torch.Tensor]:
    for projection in model.projections:
        yield from (part.data for part in projection.parts)  # type: ignore[attr-defined]
    for layer in model.layers:
        assert layer.mixer is not None
        assert layer.mixer.norm is not None
        yield layer.mixer.norm.weight
    yield from (part.data for part in model.embedding.parts)  # type: ignore[attr-defined]


def is_open(path: Path) -> bool:
    gc.collect()
    for link in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            if str(path) in os.readlink(link):
                return True
    return False


def at_read(monkeypatch: pytest.MonkeyPatch, number: int, act: Callable[[], object]) -> list[int]:
    """Call a function before the file is read for the n-th time. Return the counter of reads."""
    reads: list[int] = []

    def read(descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        reads.append(offset)
        if len(reads) == number:
            act()
        return preadv(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", read)
    return reads


@pytest.mark.parametrize(("options", "left"), CASES, ids=str)
def test_a_file_that_shrinks_at_any_moment_of_the_load_is_one_line(
    model: Path, options: dict[str, Any], left: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = weights_file(model)
    content = path.read_bytes()
    reads = at_read(monkeypatch, 0, lambda: None)
    load_model(model, **options)
    num_reads = len(reads)
    for number in range(1, num_reads + 1, 2):
        path.write_bytes(content)
        at_read(monkeypatch, number, lambda: os.truncate(path, left))
        with pytest.raises(ModelError) as caught:
            load_model(model, **options)
        message = str(caught.value)
        assert path.name in message
        assert "\n" not in message
        if number > num_reads // 2:
            assert f"became shorter: {left} of {len(content)} bytes are left" in message
    del caught
    assert not is_open(path)


@pytest.mark.parametrize("change", ["removed", "replaced"])
def test_a_file_that_loses_its_name_while_it_is_loaded_is_loaded_whole(
    model: Path, change: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = weights_file(model)
    expected = list(state_of(load_model(model)[0]))
    other = tmp_path / "other"
    other.write_bytes(b"something else")
    at_read(monkeypatch, 5, path.unlink if change == "removed" else lambda: other.replace(path))
    found = list(state_of(load_model(model)[0]))
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


def test_a_file_that_is_written_to_while_it_is_loaded_is_refused(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = weights_file(model)
    os.utime(path, (1, 1))

    def write() -> None:
        with path.open("r+b") as file:
            file.seek(-4, os.SEEK_END)
            file.write(b"\0\0\0\1")

    at_read(monkeypatch, 5, write)
    with pytest.raises(ModelFormatError, match="was written to while it was read; load it again when it is complete"):
        load_model(model)


@pytest.mark.parametrize("code", [errno.EIO, errno.ESTALE, errno.ENOMEM])
def test_a_disk_that_fails_is_one_line(model: Path, code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise OSError(code, os.strerror(code))

    reads = at_read(monkeypatch, 0, lambda: None)
    load_model(model)
    for number in (1, 2, len(reads) // 2, len(reads)):
        at_read(monkeypatch, number, fail)
        with pytest.raises(ModelError, match=f"cannot be read: {os.strerror(code)}"):
            load_model(model)


@pytest.mark.parametrize(
    "place", ["infer.files.tensors.lazy_weights.np.empty", "infer.compute.backends.host_memory.mmap.mmap"]
)
def test_memory_that_is_not_there_names_the_weight(model: Path, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*given: object, **options: object) -> NoReturn:
        raise MemoryError if "np" in place else OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    load_model(model)
    monkeypatch.setattr("infer.compute.backends.cpu.weights.packed_weight._pieces", Pieces())
    monkeypatch.setattr(place, fail)
    check_refused(lambda: load_model(model), r"no memory is left for (the )?\d+ bytes of ", ModelError)


def test_a_saved_session_that_shrinks_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "session"
    values = {"keys": torch.arange(5000.0), "values": torch.ones(3000, dtype=torch.uint8)}
    write_session(path, {"weights": "a"}, [1, 2, 3], {"note": {}}, lambda: values.items())
    content = path.read_bytes()
    reads = at_read(monkeypatch, 0, lambda: None)
    saved = read_session(path, {"weights": "a"}, 23_000)
    assert saved.token_ids == [1, 2, 3]
    assert all(torch.equal(saved.tensors[name], value) for name, value in values.items())
    for number in range(1, len(reads) + 1):
        path.write_bytes(content)
        at_read(monkeypatch, number, lambda: os.truncate(path, 7))
        with pytest.raises(InvalidRequestError, match="not a complete saved session: file: became shorter: 7 of "):
            read_session(path, {"weights": "a"}, 23_000)
    path.write_bytes(content)
    with pytest.raises(InvalidRequestError, match=r"cache: expected at most 22999 bytes, .* got 23000"):
        read_session(path, {"weights": "a"}, 22_999)


def test_reads_that_bring_less_than_was_asked_for_continue(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = list(state_of(load_model(model)[0]))
    fingerprint = open_checkpoint(model).fingerprint()
    monkeypatch.setattr(os, "preadv", lambda file, buffers, offset: preadv(file, [buffers[0][:997]], offset))
    assert all(torch.equal(*pair) for pair in zip(state_of(load_model(model)[0]), expected, strict=True))
    assert open_checkpoint(model).fingerprint() == fingerprint


@pytest.mark.skipif(sys.platform != "linux", reason="hardware: a system that tells what a process has mapped")
def test_no_file_of_a_model_is_mapped_while_it_is_loaded_or_after(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mapped file that shrinks would end the process."""
    maps: list[str] = []
    checkpoint = open_checkpoint(model)
    at_read(monkeypatch, 7, lambda: maps.append(Path("/proc/self/maps").read_text()))
    loaded = load_model(model)
    maps.append(Path("/proc/self/maps").read_text())
    assert checkpoint.tensors
    assert loaded
    assert len(maps) == 2
    assert not any(str(model) in each for each in maps)


def test_a_small_file_that_changes_is_read_as_it_was_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "config.json"
    path.write_text('{"a": 1}')
    at_read(monkeypatch, 1, lambda: path.write_text('{"a": 1}' + " " * 1000))
    assert read_json_file(path) == {"a": 1}
    at_read(monkeypatch, 1, lambda: os.truncate(path, 3))
    with pytest.raises(ModelFormatError, match=r"config\.json: file: became shorter: 3 of 1008 bytes are left"):
        read_json_file(path)


@pytest.mark.parametrize("kind", ["folder", "pipe", "device", "missing", "locked"])
def test_only_regular_files_are_opened(tmp_path: Path, kind: str) -> None:
    path = tmp_path / kind
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)  # opening it would wait for ever
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "locked":
        path.touch()
        path.chmod(0)
        if os.access(path, os.R_OK):
            pytest.skip("hardware: the superuser may read everything")
    reason = "is not a regular file" if kind in ("folder", "pipe", "device") else "cannot be read: "
    check_refused(lambda: OpenFile(path), reason, ModelError)


@pytest.mark.parametrize("name", ["a\nb.gguf", "\x1b[2J.gguf", "\u2028.gguf", "\x85.gguf"])
def test_a_name_that_breaks_lines_is_escaped(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_bytes(b"GGUF" * 10)
    message = refusal(lambda: load_model(path), ModelFormatError)
    assert (len(message.splitlines()), "\x1b" in message) == (1, False)


@pytest.mark.parametrize("name", ["tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja"])
@pytest.mark.parametrize("kind", ["dangling", "loop", "pipe", "folder"])
def test_a_file_that_is_there_and_cannot_be_read_is_not_passed_over(tmp_path: Path, name: str, kind: str) -> None:
    path = write_folder(tmp_path / "model") / name
    path.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to(name if kind == "loop" else "nothing")
    check_refused(lambda: load_model(path.parent), f"{name}: file: is (missing|not a regular file)", ModelFormatError)
