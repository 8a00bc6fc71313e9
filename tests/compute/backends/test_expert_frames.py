"""Experts that are read from a file: the bits of experts in memory, and files that are damaged, cut or not finished."""

import errno
import fcntl
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from extent import slow_except
from infer.compute import ops
from infer.compute.backends.cpu import operations as cpu
from infer.compute.backends.cpu.experts import expert_file
from infer.compute.backends.cpu.experts.expert_store import CpuExpertStore, LayerFrames
from infer.compute.backends.cpu.experts.pool_plan import PoolPlan, RecordForm
from infer.compute.backends.cpu.recording import record
from infer.compute.backends.cpu.thread_records import fields_of
from infer.compute.backends.cpu.threads.dispatch_table import DispatchTable
from infer.compute.backends.cpu.threads.pool import thread_pool
from infer.compute.operands.weights import ExpertWeights, Norm
from infer.errors import InferError, InvalidRequestError, ModelError
from infer.system.atomic import replacing
from layer_caches import threads
from programs import Programs
from test_expert_kernels import (
    EXPERTS,
    HIDDEN,
    INNER,
    NORM,
    ROUTER,
    WEIGHTED,
    make_experts,
    make_x,
    prepared,
    with_norms,
)

CHOSEN = ROUTER.num_chosen
MIXED = [("Q4_K", "Q8_0", "BF16"), ("BF16", "BF16", "Q8_0"), ("Q8_0", "F32", "Q4_K")]
ALIKE = [("F32",) * 3, ("Q8_0",) * 3, ("Q4_K",) * 3, ("MXFP4",) * 3, ("BF16",) * 3]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of the files."""
    monkeypatch.setattr(expert_file, "base_folder", lambda: tmp_path)
    return tmp_path / "experts"


class Opened(NamedTuple):
    store: CpuExpertStore
    layers: list[ExpertWeights]


def open_store(
    layers: list[ExpertWeights], num_frames: int, precision: ops.Precision = "exact", made_of: str = "test"
) -> Opened:
    """Return the layers with experts that share one pool of frames."""
    first = layers[0]
    types: Any = tuple(each.parts[0].type for each in (first.gate, first.up, first.down))  # type: ignore[attr-defined]
    router = first.router
    form = RecordForm(types, HIDDEN, INNER)
    plan = PoolPlan(form, router.num_experts, router.num_chosen, tuple(range(len(layers))), num_frames)
    store = CpuExpertStore([plan], "model", made_of, precision, lambda: None)
    opened = list[ExpertWeights]()
    with store.loading():
        for index, layer in enumerate(layers):
            gate, up, down, frames = store.load(index, sources_of(layer))
            ready = prepared(layer, precision=precision)
            matrices = zip(("gate", "up", "down"), (gate, up, down), strict=True)
            ready = prepared(layer, precision=precision)
            read = {name: replace(getattr(ready, name), parts=(matrix,)) for name, matrix in matrices}
            opened.append(replace(ready, frames=frames, **read))
    return Opened(store, opened)


def sources_of(layer: ExpertWeights) -> Callable[[int], list[Any]]:
    return lambda expert: [each.parts[expert] for each in (layer.gate, layer.up, layer.down)]


def add(x: Tensor, experts: ExpertWeights, post_norm: Norm | None = None) -> Tensor:
    return cpu.add_experts(x.clone(), NORM, experts, post_norm)


def memory_of(layer: ExpertWeights) -> LayerFrames:
    assert isinstance(layer.frames, LayerFrames)
    return layer.frames


# Bits


@pytest.mark.slow(rest=8)
@pytest.mark.parametrize("types", ALIKE + MIXED, ids="-".join)
@pytest.mark.parametrize("num_frames", [CHOSEN, 5, EXPERTS])
def test_experts_from_a_file_give_the_bits_of_experts_in_memory(types: tuple[str, str, str], num_frames: int) -> None:
    gate, up, down = types
    plain = make_experts(gate, up=up, down=down, shared=256, has_bias=True)
    kinds = [(plain, None), (with_norms(plain), NORM), (replace(plain, router=WEIGHTED), None)]
    x = make_x(45)
    for index, (own, post_norm) in enumerate(kinds):
        store, (paged,) = open_store([own], num_frames, made_of=f"kind {index}")
        expected = add(x, prepared(own), post_norm)
        assert torch.equal(add(x, paged, post_norm), expected)
        for size in (1, 7):
            parts = [add(part, paged, post_norm) for part in x.split(size)]
            assert torch.equal(torch.cat(parts), expected)
        for num_threads in (1, 3):
            with threads(num_threads):
                assert torch.equal(add(x, paged, post_norm), expected)
        assert store.counts[1] >= EXPERTS  # each was read


@pytest.mark.parametrize("precision", slow_except(["exact"], ["exact", "fast"]))
def test_layers_that_share_frames_give_the_same_bits_when_recorded(precision: ops.Precision) -> None:
    layers = [make_experts("Q8_0"), replace(make_experts("Q8_0"), router=replace(ROUTER, scale=2.5))]
    store, paged = open_store(layers, EXPERTS + 1, precision)
    with record(32, 1) as recording:
        x = recording.tensor("x", 32, HIDDEN)
        for layer in paged:
            cpu.add_experts(x, NORM, layer, None)
    table, state = DispatchTable(recording.commands), fields_of(recording.state)
    resident = [prepared(layer, precision=precision) for layer in layers]
    for seed, count in enumerate((1, 32, 3, 1, 1, 17)):
        x[:count] = expected = make_x(count, seed)
        for layer in resident:
            expected = add(expected, layer)
        state.num_tokens = count
        thread_pool().run(table, recording.state)
        recording.check()
        assert torch.equal(x[:count], expected)
    assert sum(len(held(layer)) for layer in paged) == EXPERTS + 1
    assert store.counts[0] > 0
    assert store.counts[1] > EXPERTS + 1


def test_random_steps_give_the_same_bits_whatever_was_computed_before() -> None:
    own = make_experts("Q8_0")
    resident, x, generator = prepared(own), make_x(64), np.random.default_rng(0)
    expected = add(x, resident)
    for num_frames in (CHOSEN, 4, 6, 8):
        _, (paged,) = open_store([own], num_frames)
        for _ in range(125):
            rows = torch.from_numpy(generator.permutation(len(x))[: generator.choice([1, 1, 1, 2, 5, 20])])
            assert torch.equal(add(x[rows], paged), expected[rows])


def test_the_expert_goes_that_was_used_the_least_and_the_longest_ago() -> None:
    store, (paged,) = open_store([make_experts("F32", router=replace(ROUTER, num_chosen=1))], 3)
    pool, x = memory_of(paged).pool, make_x(200)
    rows: dict[int, Tensor] = {}
    for row in x.split(1):
        add(row, paged)
        rows[int(pool.last_used.argmax())] = row
    first, second, third, fourth, *_ = rows  # experts that some row chooses
    for expert in (first, second, third):
        pool.uses.zero_()
        add(rows[expert], paged)
    before = store.counts
    for expert in (third, first, third):
        add(rows[expert], paged)
    assert store.counts == (before[0] + 3, before[1])
    add(rows[fourth], paged)
    assert pool.frames[second] == -1
    assert min(pool.frames[first], pool.frames[third], pool.frames[fourth]) >= 0


def test_uses_are_kept_and_the_most_used_experts_are_read_at_the_next_start() -> None:
    own, x = make_experts("Q8_0"), make_x(1)
    store, (paged,) = open_store([own], CHOSEN)
    for _ in range(3):
        add(x, paged)
    assert store.counts == (2 * CHOSEN, CHOSEN)
    used = set(held(paged))
    del store, paged
    store, (paged,) = open_store([own], CHOSEN)
    assert set(held(paged)) == used
    assert torch.equal(add(x, paged), add(x, prepared(own)))
    assert store.counts == (CHOSEN, 0)


def held(layer: ExpertWeights) -> list[int]:
    """Return the experts of a layer that are in memory."""
    return [expert for expert, frame in enumerate(memory_of(layer).frames.tolist()) if frame >= 0]


# Files


def data_of(folder: Path) -> Path:
    (path,) = folder.glob("*.experts")
    return path


def damage(path: Path, offset: int) -> None:
    """Change one bit of a file, in place."""
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1]))


def test_the_file_is_written_once_and_again_for_other_weights(folder: Path) -> None:
    own, x = make_experts("Q8_0"), make_x(9)

    open_store([own], CHOSEN)
    written = data_of(folder).stat().st_ino
    _, (paged,) = open_store([own], 5)
    assert data_of(folder).stat().st_ino == written
    assert torch.equal(add(x, paged), add(x, prepared(own)))
    other = make_experts("Q8_0", router=WEIGHTED)
    open_store([other], CHOSEN, made_of="other weights")
    assert data_of(folder).stat().st_ino != written


@pytest.mark.parametrize("offset", [3, 60, 4100, 5000])
def test_a_damaged_header_or_sum_is_found_at_the_start_and_the_file_is_written_again(folder: Path, offset: int) -> None:
    own, x = make_experts("Q8_0", router=replace(ROUTER, num_experts=9)), make_x(9)
    open_store([own], CHOSEN)
    path = data_of(folder)
    if offset == 5000:
        os.truncate(path, path.stat().st_size - 1)
    else:
        damage(path, offset)
    _, (paged,) = open_store([own], CHOSEN)
    assert torch.equal(add(x, paged), add(x, prepared(own)))


def test_a_damaged_expert_is_found_when_it_is_read_named_and_written_again(folder: Path) -> None:
    own, x = make_experts("Q8_0"), make_x(40)
    store, (paged,) = open_store([own], EXPERTS)  # so that no other expert takes the frame
    path, form = data_of(folder), memory_of(paged).pool.plan.form
    damage(path, path.stat().st_size - EXPERTS * form.num_bytes + 4 * form.num_bytes + form.starts[1] + 17)
    with pytest.raises(InferError, match=r"expert 4 of layer 0 in .*\.experts is damaged: it is removed, and written"):
        add(x, paged)
    assert not path.exists()
    with pytest.raises(InferError, match="expert 4 of layer 0"):  # never its old bytes
        add(x, paged)
    _, (again,) = open_store([own], CHOSEN)
    assert torch.equal(add(x, again), add(x, prepared(own)))
    assert store.counts[1] > EXPERTS


def test_an_expert_that_cannot_be_read_now_is_read_again_later(folder: Path) -> None:
    own, x = make_experts("Q8_0"), make_x(40)
    _, (paged,) = open_store([own], CHOSEN)
    whole = data_of(folder).read_bytes()
    os.truncate(data_of(folder), len(whole) - 8192)
    with pytest.raises(InferError, match=r"cannot be read: the file became shorter; load the model again"):
        add(x, paged)
    data_of(folder).write_bytes(whole)
    assert torch.equal(add(x, paged), add(x, prepared(own)))


def test_a_file_in_its_place_changes_no_bit_of_a_model_that_runs(folder: Path) -> None:
    own, x = make_experts("Q8_0"), make_x(40)
    _, (paged,) = open_store([own], CHOSEN)
    other = folder / "other"
    other.write_bytes(bytes(data_of(folder).stat().st_size))
    other.replace(data_of(folder))
    assert torch.equal(add(x, paged), add(x, prepared(own)))


def test_a_full_disk_is_one_line_and_leaves_no_file(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = make_experts("Q8_0")

    class Full(BytesIO):
        def write(self, content: Any) -> int:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    @contextmanager
    def replacing_full(path: Path) -> Iterator[Full]:
        with replacing(path):
            yield Full()

    with monkeypatch.context() as patch:
        patch.setattr(expert_file, "replacing", replacing_full)
        with pytest.raises(ModelError, match=r"experts_memory stores .* in .*: No space left on device \(free"):
            open_store([own], CHOSEN)
    assert not list(folder.glob("*.experts*"))
    monkeypatch.setattr(expert_file, "_free_bytes", lambda folder: 10**9)
    with pytest.raises(ModelError, match=r"the disk has [0-9]+ MB too little \(free some of the disk"):
        open_store([own], CHOSEN)


def test_a_file_that_is_in_use_does_not_make_room(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, _ = open_store([make_experts("Q8_0")], CHOSEN)
    used = folder / "a.experts"
    data_of(folder).rename(used)
    with monkeypatch.context() as patch:
        patch.setattr(expert_file, "_free_bytes", lambda folder: 10**9 if used.exists() else 10**12)
        with pytest.raises(ModelError, match="MB too little"):
            open_store([make_experts("Q8_0")], CHOSEN)
        assert used.exists()
        del store, _
        open_store([make_experts("Q8_0")], CHOSEN)
    assert not used.exists()


def test_a_process_says_that_it_waits_for_another_one_that_writes(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    open_store([make_experts("Q8_0")], CHOSEN)
    data_of(folder).unlink()
    with (folder / "lock").open("rb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        waiting = threading.Thread(target=open_store, args=([make_experts("Q8_0")], CHOSEN))
        waiting.start()
        told = ""
        while waiting.is_alive() and "\n" not in told:
            told += capsys.readouterr().err
            time.sleep(0.001)
    waiting.join()
    assert told == f"infer: waiting for another process, which packs experts in {folder}\n"
    assert data_of(folder).exists()


def test_a_model_s_own_file_that_is_of_no_use_makes_room_first(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    open_store([make_experts("Q8_0")], CHOSEN)
    own, other = data_of(folder), folder / "a.experts"
    other.write_bytes(b"of another model")
    os.utime(other, (1000, 1000))
    monkeypatch.setattr(expert_file, "_free_bytes", lambda folder: 10**9 if own.exists() else 10**12)
    open_store([make_experts("Q8_0")], CHOSEN, made_of="other weights")
    assert other.exists()
    assert own.exists()


def test_files_of_other_models_make_room_the_oldest_first(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    open_store([make_experts("Q8_0")], CHOSEN)
    old, new = folder / "a.experts", folder / "b.experts"
    for age, path in enumerate((new, old)):
        path.write_bytes(b"x")
        os.utime(path, (10 - age, 10 - age))
    monkeypatch.setattr(expert_file, "_free_bytes", lambda folder: 10**9 if old.exists() else 10**12)
    open_store([make_experts("Q8_0")], CHOSEN, made_of="other")
    assert new.exists()
    assert not old.exists()


WRITER = """
import os, signal, sys
sys.path[:] = {path!r}
from pathlib import Path
import test_expert_frames as tests
tests.expert_file.base_folder = lambda: Path({base!r})
own, count = tests.make_experts("Q8_0"), 0
def sources(expert):
    if expert == 5:
        os.kill(os.getpid(), signal.SIGKILL)
    return [each.parts[expert] for each in (own.gate, own.up, own.down)]
tests.sources_of = lambda layer: sources
tests.open_store([own], 3)
"""


def test_a_writer_that_is_killed_leaves_nothing_that_is_used_or_kept(programs: Programs, folder: Path) -> None:
    done = programs.run(WRITER.format(path=sys.path, base=str(folder.parent)))
    assert done.returncode == -signal.SIGKILL
    assert [path.suffix for path in folder.iterdir() if ".experts." in path.name]
    own, x = make_experts("Q8_0"), make_x(20)
    _, (paged,) = open_store([own], CHOSEN)
    assert torch.equal(add(x, paged), add(x, prepared(own)))
    assert not [path for path in folder.iterdir() if ".experts." in path.name]


def test_experts_of_several_types_are_refused_in_a_line() -> None:
    own = make_experts("Q8_0")
    parts = (*own.gate.parts[:-1], make_experts("F32").gate.parts[0])
    with pytest.raises(InvalidRequestError, match="experts of layer 0 must be of one type, got F32 and Q8_0"):
        open_store([replace(own, gate=replace(own.gate, parts=parts))], CHOSEN)
