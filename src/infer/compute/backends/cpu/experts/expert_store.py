"""The experts of a model that are read from a file: memory for some of them, which all layers of one form share.

A load packs each expert once, into the file (`expert_file`). From then on commands read what a step needs into frames
(`frames`). Tables and frames stay where they are, because recordings have their addresses.
"""

import hashlib
import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import BinaryIO, final

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from infer.compute.backends.base import ExpertStore, LoadedRecords
from infer.compute.backends.cpu.compile.addresses import compiled_address
from infer.compute.backends.cpu.expert_records import EXPERT_FETCH, EXPERT_POOL
from infer.compute.backends.cpu.experts.expert_file import ExpertFile, Sums
from infer.compute.backends.cpu.experts.pool_plan import BLOCK_BYTES, MOST_HALVINGS, PART_BYTES, PARTS, PoolPlan
from infer.compute.backends.cpu.isa import instruction_set
from infer.compute.backends.cpu.layouts import LAYOUTS, PLANES
from infer.compute.backends.cpu.thread_records import STATE, fields_of
from infer.compute.backends.cpu.threads.dispatch_table import BARRIER, Arguments, Command, DispatchTable
from infer.compute.backends.cpu.threads.pool import aligned, thread_pool
from infer.compute.backends.cpu.weights.packed_weight import PackedWeight
from infer.compute.backends.cpu.weights.prepare_weights import Source, pack_into
from infer.compute.backends.host_memory import pages
from infer.compute.operands.weights import ExpertFrames, Weight
from infer.errors import InferError, InvalidRequestError
from infer.system.open_file import OpenFile

_PACKAGES = ("infer.compute.backends.cpu.weights", "infer.compute.quantization", "infer.files")  # that make the bytes
_DAMAGED = "is damaged: it is removed, and written again when the model is next loaded"


@final
class FramePool:
    """The frames of the layers whose experts have one form, and the tables by which commands find them."""

    def __init__(self, plan: PoolPlan, sums: Sums, offset: int) -> None:
        self.plan = plan
        records, frames, form = plan.num_records, plan.num_frames, plan.form
        self.memory = pages(frames * form.num_bytes)
        self.bytes = torch.frombuffer(self.memory, dtype=torch.uint8)
        self.sums = sums.reshape(records, form.num_parts)
        self.frames, self.uses, self.last_used = (torch.full((records,), first) for first in (-1, 0, 0))
        self.owners, self.needed, self.is_unread = (torch.full((frames,), first) for first in (-1, -1, 0))
        self.arguments = Arguments(
            EXPERT_POOL, memory=self.bytes, record_bytes=form.num_bytes, part_bytes=PART_BYTES,
            num_parts=form.num_parts, num_frames=frames, descriptor=-1, offset=offset,
            checksums=torch.from_numpy(self.sums), frames=self.frames, uses=self.uses, last_used=self.last_used,
            owners=self.owners, needed=self.needed, is_unread=self.is_unread, half_life=plan.half_life,
        )  # fmt: skip
        self.fields = fields_of(self.arguments.record)

    def matrix(self, part: int, planes: int) -> PackedWeight:
        """Return gate, up or down (`part` 0, 1, 2) of a layer's experts. Its address is that of frame 0."""
        form = self.plan.form
        rows, columns = form.shapes[part]
        return PackedWeight(
            LAYOUTS[form.types[part]], (self.plan.num_experts * rows, columns), self.bytes[form.starts[part] :], planes
        )

    def present_uses(self) -> Sums:
        """Return how often each expert was used, i64 [num_records], halved for the time since."""
        halvings = torch.clamp((self.fields.time - self.last_used) >> self.plan.half_life, max=MOST_HALVINGS)
        return (self.uses >> halvings).numpy()

    def warm(self, uses: Sums) -> None:
        """Set how often each expert was used, and read the experts used most into the frames.

        `uses` is i64 [num_records].
        """
        self.uses[:] = torch.from_numpy(uses)
        order = [int(expert) for expert in np.argsort(-uses, kind="stable") if uses[expert] > 0]
        chosen = order[: self.plan.num_frames]
        if not chosen:
            return
        for frame, expert in enumerate(chosen):
            self.frames[expert], self.owners[frame] = frame, expert
        self.fields.num_used = len(chosen)
        missing, count = torch.tensor(chosen), torch.tensor([len(chosen)])
        fetching = Arguments(EXPERT_FETCH, missing=missing, num_missing=count, pool=self.arguments.address)
        _run("fetch", fetching)


@final
class LayerFrames(ExpertFrames):
    """The frames of one layer's experts."""

    def __init__(self, store: "CpuExpertStore", pool: FramePool, place: int) -> None:
        self.store, self.pool, self.first_expert = store, pool, place * pool.plan.num_experts

    @property
    def frames(self) -> Int[Tensor, "experts"]:
        return self.pool.frames[self.first_expert : self.first_expert + self.pool.plan.num_experts]


@final
class CpuExpertStore(ExpertStore):
    def __init__(
        self, plans: Sequence[PoolPlan], name: str, made_of: str, precision: str, check_unchanged: Callable[[], None]
    ) -> None:
        """Make the memory. `name` names the file, and `made_of` identifies the weights and their conversion.

        `check_unchanged` raises ModelError if the weights are no longer those of `made_of`.
        """
        self._planes, self._check_unchanged = PLANES[precision], check_unchanged
        counts = [plan.num_records * plan.form.num_parts for plan in plans]
        sizes = [plan.num_records * plan.form.num_bytes for plan in plans]
        identity = repr((made_of, [plan[:-1] for plan in plans], instruction_set().inputs, _code(), PART_BYTES))
        digest = hashlib.blake2b(identity.encode(), digest_size=32).digest()
        self._file = ExpertFile(f"{name} {instruction_set().inputs}", digest, sum(counts), sum(sizes))
        self._sums = np.zeros(sum(counts), np.int64)
        self._pools, first, offset = list[FramePool](), 0, self._file.start
        for plan, count, size in zip(plans, counts, sizes, strict=True):
            self._pools.append(FramePool(plan, self._sums[first : first + count], offset))
            first, offset = first + count, offset + size
        self._writing: BinaryIO | None = None
        self._opened: OpenFile | None = None

    @contextmanager
    def loading(self) -> Iterator[None]:
        with self._file.writing(self._sums) as self._writing:
            yield
            self._check_unchanged()
        self._writing = None
        opened = self._file.try_open()
        if opened is None:
            raise InferError(f"{self._file.path} was removed while it was written: load the model again")
        self._opened, self._sums[:] = opened
        uses = self._file.read_uses(sum(pool.plan.num_records for pool in self._pools))
        for pool in self._pools:
            pool.fields.descriptor = self._opened.descriptor
            if uses is not None:
                own, uses = np.split(uses, [pool.plan.num_records])
                pool.warm(own)
        self.check()
        weakref.finalize(self, _write_uses, self._file, self._pools)

    def load(self, layer: int, sources: Callable[[int], Sequence[Weight]]) -> LoadedRecords:
        index, pool = next((i, each) for i, each in enumerate(self._pools) if layer in each.plan.layers)
        place = pool.plan.layers.index(layer)
        if self._writing is not None:
            before = sum(each.plan.num_records * each.plan.form.num_bytes for each in self._pools[:index])
            first = place * pool.plan.num_experts
            self._writing.seek(self._file.start + before + first * pool.plan.form.num_bytes)
            for expert in range(pool.plan.num_experts):
                self._writing.write(_packed_record(pool, sources(expert), first + expert))
        gate, up, down = (pool.matrix(part, self._planes) for part in range(len(PARTS)))
        return LoadedRecords(gate, up, down, LayerFrames(self, pool, place))

    def check(self) -> None:
        """Raise InferError if a run has met an expert that cannot be read. To be called after each run."""
        for pool in self._pools:
            if failure := pool.fields.failure[0]:
                pool.fields.failure[0] = 0
                raise self._failed(pool, *divmod(failure - 1, 2))

    def _failed(self, pool: FramePool, number: int, is_damaged: int) -> InferError:
        record, part = divmod(number, pool.plan.form.num_parts)
        place, expert = divmod(record, pool.plan.num_experts)
        problem = _DAMAGED
        if is_damaged:
            self._file.remove(self._opened)
        else:
            problem = f"cannot be read: {self._problem_at(pool, record, part)}"
        where = f"expert {expert} of layer {pool.plan.layers[place]}"
        return InferError(f"{where} in {self._file.path} {problem}")

    def _problem_at(self, pool: FramePool, record: int, part: int) -> str:
        """Return why a part cannot be read."""
        assert self._opened is not None
        offset = pool.fields.offset + record * pool.plan.form.num_bytes + part * PART_BYTES
        try:
            if os.fstat(self._opened.descriptor).st_size < self._file.size:
                return "the file became shorter; load the model again"
            os.preadv(self._opened.descriptor, [pages(BLOCK_BYTES)], offset)
        except OSError as error:
            return f"{error.strerror}; load the model again if that does not end"
        return "a read was not complete; it can be read now"

    @property
    def counts(self) -> tuple[int, int]:
        """(Number of experts that steps needed and that were in memory, number of experts that were read.)"""
        return sum(pool.fields.num_hits for pool in self._pools), sum(pool.fields.num_misses for pool in self._pools)

    @property
    def memory_bytes(self) -> int:
        return sum(pool.plan.num_bytes for pool in self._pools)

    @property
    def path(self) -> Path:
        return self._file.path


def _packed_record(pool: FramePool, sources: Sequence[Weight], number: int) -> memoryview:
    """Pack an expert into frame 0, which nothing else uses before the model is loaded, and return its record."""
    form = pool.plan.form
    record = pool.bytes[: form.num_bytes]
    record[form.starts[-1] :] = 0
    for part, source in enumerate(sources):
        rows, columns = form.shapes[part]
        assert isinstance(source, Source)
        if source.type != form.types[part]:
            raise InvalidRequestError(
                f"the experts of layer {pool.plan.layers[number // pool.plan.num_experts]} must be of one type, "
                f"got {source.type} and {form.types[part]}"
            )
        packed = PackedWeight(LAYOUTS[source.type], (rows, columns), record[form.starts[part] :], planes=1)
        pack_into([source], packed, 0)
    _run("check", Arguments(EXPERT_FETCH, missing=torch.tensor([number]), pool=pool.arguments.address))
    return record.numpy().data


def _run(kernel: str, arguments: Arguments) -> None:
    function = compiled_address(f".experts.kernels:{kernel}", EXPERT_FETCH)
    command = Command(function, arguments.record, BARRIER, kernel, (arguments,))
    thread_pool().run(DispatchTable([command]), aligned(1, STATE))


def _write_uses(file: ExpertFile, pools: Sequence[FramePool]) -> None:
    file.write_uses([pool.present_uses() for pool in pools])


@cache
def _code() -> str:
    """Return a digest of the code that makes the bytes of a packed expert."""
    digest = hashlib.blake2b(digest_size=16)
    for package in _PACKAGES:
        for folder in getattr(find_spec(package), "submodule_search_locations", None) or ():
            for path in sorted(Path(folder).rglob("*.py")):
                digest.update(path.relative_to(folder).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()
