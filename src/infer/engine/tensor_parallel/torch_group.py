"""Ranks that torch connects: NCCL between GPUs, gloo between CPUs of several machines.

An op gathers by a call of torch. A CUDA graph records NCCL's kernels with the ops'. On a CPU's own backend, whose
recordings hold no calls of torch, nothing is captured.
"""

from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, final

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, distributed

from infer.compute.operands.group import Group
from infer.errors import InferError

_TIMEOUT = timedelta(minutes=10)  # a rank that takes longer for a step hangs


@final
class TorchGroup(Group):
    """A group whose ranks find each other through a file that all of them can write."""

    def __init__(self, rank: int, size: int, meeting: Path, transport: Literal["gloo", "nccl"] = "gloo") -> None:
        super().__init__(rank, size)
        torch_distributed: Any = distributed  # a torch without CUDA has no NCCL
        make = torch_distributed.ProcessGroupNCCL if transport == "nccl" else torch_distributed.ProcessGroupGloo
        self._ranks: Any = make(torch_distributed.FileStore(str(meeting), size), rank, size, _TIMEOUT)
        self._transport, self._has_failed = transport, False

    @property
    def has_failed(self) -> bool:
        return self._has_failed

    def fail(self) -> None:
        self._has_failed = True
        if self._transport == "nccl":  # its kernels would wait on the device for a rank that has ended
            with suppress(RuntimeError):
                self._ranks.abort()

    def begin_anew(self) -> None:
        if self._has_failed:
            raise InferError("a step was interrupted, and ranks that torch connects cannot leave it: load again")

    def mend(self) -> None:
        return

    def gather(self, own: Float[Tensor, "rows own"], widths: Sequence[int]) -> Float[Tensor, "rows width"]:
        """Gather each rank's columns, padded to the width of the widest rank for the transfer."""
        if not len(own):
            return own.new_empty(0, sum(widths))
        padded = F.pad(own.contiguous(), (0, max(widths) - own.shape[1]))
        parts = [torch.empty_like(padded) for _ in widths]
        try:
            self._ranks.allgather([parts], [padded]).wait()
        except RuntimeError as error:
            self._has_failed = True
            raise InferError(f"another rank of this model has ended ({str(error).splitlines()[0]:.80})") from error
        return torch.cat([part[:, :width] for part, width in zip(parts, widths, strict=True)], dim=1)
