"""Ranks of one machine that gather through memory they share, within compiled code.

    a line: not 0 where the group has failed | a line a rank: the exchange it has come to | two buffers

Each process counts the exchanges by itself: they are the same ones, in the same order.
"""

import ctypes
import mmap
from collections.abc import Sequence
from itertools import accumulate
from typing import final

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from infer.backends.cpu.compiled import compiled_address
from infer.backends.cpu.records import EXCHANGE, GATHER, TELL
from infer.backends.cpu.state import LINE_BYTES, STATE
from infer.backends.cpu.table import BARRIER, Command, DispatchTable, Walk
from infer.backends.cpu.threads import aligned, team
from infer.errors import InferError, InvalidRequestError
from infer.operands.group import Group, Shares

_WORDS = LINE_BYTES // 8


@final
class MemoryGroup(Group):
    """`memory` is mapped by all ranks of it, and zero before the first one begins."""

    def __init__(self, rank: int, size: int, memory: mmap.mmap) -> None:
        super().__init__(rank, size)
        self._memory = memory
        header = LINE_BYTES * (1 + size)
        self._words = (ctypes.c_int64 * (header // 8)).from_buffer(memory)
        start = ctypes.addressof(self._words)
        self.exchange = aligned(1, EXCHANGE)
        self.exchange["rank"], self.exchange["size"] = rank, size
        self.exchange["failed"], self.exchange["arrivals"] = start, start + LINE_BYTES
        self.exchange["buffers"] = start + header
        self._buffer_bytes = (len(memory) - header) // 2 // LINE_BYTES * LINE_BYTES
        self.exchange["buffer_bytes"] = self._buffer_bytes

    @property
    def has_failed(self) -> bool:
        return self._words[0] != 0

    def fail(self) -> None:
        self._words[0] = 1

    def begin_anew(self) -> None:
        self.exchange["begun"] = self.exchange["done"] = 0
        self._words[_WORDS * (1 + self.rank)] = 0

    def mend(self) -> None:
        self._words[0] = 0

    def gather(self, own: Float[Tensor, "rows own"], widths: Sequence[int]) -> Float[Tensor, "rows width"]:
        own, shares = own.float().contiguous(), Shares(self, tuple(accumulate(widths, initial=0)))
        out, state = torch.empty(len(own), shares.width), aligned(1, STATE)
        state["num_tokens"] = len(own)
        team().run(Walk(DispatchTable(self.commands(own, shares, out))), state)
        if self.has_failed:
            raise InferError("another rank of this model has ended")
        return out

    def commands(
        self, own: Tensor, shares: Shares, out: Tensor, *, adding: bool = False, of_logits: bool = False
    ) -> list[Command]:
        """Gather the ranks' columns in `out`, or add them to it."""
        if out.nbytes > self._buffer_bytes:
            raise InvalidRequestError(f"ranks share {self._buffer_bytes} bytes for a step, which takes {out.nbytes}")
        arguments = np.zeros(1, GATHER)
        arguments["exchange"], arguments["own"] = self.exchange.ctypes.data, own.data_ptr()
        arguments["first_column"], arguments["own_width"] = shares.own[0], own.shape[1]
        arguments["out"], arguments["width"] = out.data_ptr(), shares.width
        arguments["adding"], arguments["of_logits"] = adding, of_logits
        return [
            Command(compiled_address(f".gather:make_{name}", GATHER), arguments, BARRIER, name, (self, own, out))
            for name in ("share", "collect")
        ]

    def tell(self, name: str, stop_at: int) -> Command:
        """`lead` or `follow`, after a step of several: `stop_at` is the address of what ends them."""
        arguments = np.zeros(1, TELL)
        arguments["exchange"], arguments["stop"] = self.exchange.ctypes.data, stop_at
        return Command(compiled_address(f".gather:make_{name}", TELL), arguments, BARRIER, name, (self,))
