"""Ranks of one machine that gather through shared memory, within compiled code.

    a line: not 0 if the group has failed | a line per rank: the barrier that it has reached | two buffers | tensors

The buffers are half of the memory. Each process counts the barriers itself, and places the tensors: the ranks make the
same tensors, in the same order. A single op uses the buffers in turn. A rank that writes to a buffer again has passed
the barrier after its last use, and so have all ranks that read it.
"""

import ctypes
import math
import mmap
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, final

import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from infer.compute.backends.cpu.compile.addresses import compiled_address
from infer.compute.backends.cpu.records import EXCHANGE, TRANSFER
from infer.compute.backends.cpu.thread_records import LINE_WORDS, STATE
from infer.compute.backends.cpu.threads.dispatch_table import BARRIER, Arguments, Command, DispatchTable
from infer.compute.backends.cpu.threads.pool import aligned, thread_pool
from infer.compute.operands.group import Group, Shares
from infer.errors import InferError, InvalidRequestError

_LINE_BYTES = 8 * LINE_WORDS


@final
class MemoryGroup(Group):
    """A group whose ranks all map `memory`, which is zero before the first rank starts."""

    def __init__(self, rank: int, size: int, memory: mmap.mmap) -> None:
        super().__init__(rank, size)
        self._memory = memory
        header = _LINE_BYTES * (1 + size)
        self._words = (ctypes.c_int64 * (header // 8)).from_buffer(memory)
        start = ctypes.addressof(self._words)
        self.exchange = aligned(1, EXCHANGE)
        self.exchange["rank"], self.exchange["size"] = rank, size
        self.exchange["failed"], self.exchange["arrivals"] = start, start + _LINE_BYTES
        buffer_bytes = (len(memory) - header) // 4 // _LINE_BYTES * _LINE_BYTES
        self.exchange["buffers"], self.exchange["buffer_words"] = start + header, buffer_bytes // 8
        self._buffers = [self._place(header + number * buffer_bytes, buffer_bytes) for number in range(2)]
        self._first = header + 2 * buffer_bytes
        self.forget_tensors()

    @property
    def has_failed(self) -> bool:
        return self._words[0] != 0

    def fail(self) -> None:
        self._words[0] = 1

    def begin_anew(self) -> None:
        self.exchange["done"] = 0
        self._words[LINE_WORDS * (1 + self.rank)] = 0

    def mend(self) -> None:
        self._words[0] = 0

    def gather(self, own: Float[Tensor, "rows own"], widths: Sequence[int]) -> Float[Tensor, "rows width"]:
        shares = Shares(self, tuple(accumulate(widths, initial=0)))
        buffer = self._buffers[int(self.exchange["done"][0] + 1) & 1].view(torch.float32)
        if len(own) * shares.width > len(buffer):
            raise InvalidRequestError(
                f"ranks share {buffer.nbytes} bytes for an op, not {len(own)} × {shares.width} floats"
            )
        whole = buffer[: len(own) * shares.width].view(len(own), shares.width)
        whole[:, slice(*shares.own)] = own
        thread_pool().run(DispatchTable([self.barrier()]), aligned(1, STATE))
        if self.has_failed:
            raise InferError("another rank of this model has ended")
        return whole.clone()

    def forget_tensors(self) -> None:
        """Free the tensors of an earlier recording."""
        self._tensors, self._end = dict[tuple[Any, ...], Tensor](), self._first

    def tensor(self, role: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return memory that all ranks see. They must request the same tensors, in the same order."""
        key = (role, tuple(shape), dtype)
        if key not in self._tensors:
            num_bytes = math.prod(shape) * dtype.itemsize
            self._tensors[key] = self._place(self._end, num_bytes).view(dtype).view(tuple(shape))
            self._end += -(-num_bytes // _LINE_BYTES) * _LINE_BYTES
        return self._tensors[key]

    def _place(self, start: int, num_bytes: int) -> UInt8[Tensor, "bytes"]:
        if start + num_bytes > len(self._memory):
            raise InvalidRequestError(f"ranks share {len(self._memory)} bytes, and a step takes {start + num_bytes}")
        return torch.frombuffer(self._memory, dtype=torch.uint8, offset=start, count=num_bytes)

    def barrier(self) -> Command:
        """Return the barrier command that precedes reads of other ranks' values."""
        function = compiled_address(".ranks.gather:wait_for_ranks", EXCHANGE)
        return Command(function, self.exchange, BARRIER, "barrier", (self,))

    def transfer(self, name: str, stop_at: int) -> Command:
        """Return the command `lead` or `follow`, for the end of a step in a multi-step.

        `stop_at` is the address of the i64 that ends the multi-step.
        """
        arguments = Arguments(TRANSFER, exchange=self.exchange.ctypes.data, stop=stop_at)
        function = compiled_address(f".ranks.gather:{name}", TRANSFER)
        return Command(function, arguments.record, BARRIER, name, (self, arguments))
