"""Ranks that torch connects: gloo between CPUs of several machines. An op gathers in Python, so nothing is captured."""

from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, final

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor
from torch.distributed import FileStore, ProcessGroupGloo  # type: ignore[attr-defined]

from infer.errors import InferError
from infer.operands.group import Group

_TIMEOUT = timedelta(minutes=10)  # a rank that takes longer for a step hangs


@final
class TorchGroup(Group):
    """A group whose ranks find each other through a file that all of them can write."""

    def __init__(self, rank: int, size: int, meeting: Path) -> None:
        super().__init__(rank, size)
        self._ranks: Any = ProcessGroupGloo(FileStore(str(meeting), size), rank, size, _TIMEOUT)
        self._has_failed = False

    @property
    def has_failed(self) -> bool:
        return self._has_failed

    def fail(self) -> None:
        self._has_failed = True

    def begin_anew(self) -> None:
        if self._has_failed:
            raise InferError("a step was interrupted, and ranks that torch connects cannot leave it: load again")

    def mend(self) -> None:
        return

    def gather(self, own: Float[Tensor, "rows own"], widths: Sequence[int]) -> Float[Tensor, "rows width"]:
        """Gather each rank's columns, padded to the width of the widest rank for the transfer."""
        padded = F.pad(own.contiguous(), (0, max(widths) - own.shape[1]))
        parts = [torch.empty_like(padded) for _ in widths]
        try:
            self._ranks.allgather([parts], [padded]).wait()
        except RuntimeError as error:
            self._has_failed = True
            raise InferError(f"another rank of this model has ended ({str(error).splitlines()[0]:.80})") from error
        return torch.cat([part[:, :width] for part, width in zip(parts, widths, strict=True)], dim=1)
