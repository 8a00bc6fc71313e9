"""Token history of penalised rows, as tensors on the device. Appending a token is O(1).

    tokens[s, i]     the id at position i of slot s, prompt and output alike
    last[s, id]      1 + the last position of the id, 0 for never
    counts[s, id]    how often the id occurs in the output

An id is within the last N tokens iff last[s, id] > length − N; an id's occurrence at i is its last iff last = i + 1.
A slot has 8 bytes per entry of the vocabulary and 4 per position (SmolLM2 at 2,048: 0.4 MB; 262,144 words: 2.1 MB). On
the host, a slot that never had a penalty takes no memory. Other slots take the memory pages that contain their ids.
"""

from collections.abc import Sequence
from typing import final

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from infer.compute.sampling.columns import SamplingColumns
from infer.errors import InvalidRequestError


@final
class History:
    """Token history of slots with a fixed capacity.

    Kernels read `lengths` and the tables, so these tensors must keep their addresses.

    `last` and `counts` are 0 for every id that is not in `tokens` up to its length. So a token is written to `tokens`
    before the other tables. `begin` can then remove everything that an interrupted step left.
    """

    def __init__(self, num_slots: int, capacity: int, vocab_size: int, device: torch.device | str = "cpu") -> None:
        self.capacity, self.vocab_size = capacity, vocab_size
        self.tokens = _zeros((num_slots, capacity), torch.int32, device)
        self.last = _zeros((num_slots, vocab_size), torch.int32, device)
        self.counts = _zeros((num_slots, vocab_size), torch.int32, device)
        self.lengths = _zeros((num_slots,), torch.int64, device)
        self.num_prompt_tokens = _zeros((num_slots,), torch.int64, device)

    @property
    def num_slots(self) -> int:
        return len(self.lengths)

    def begin(self, slot: int, token_ids: Sequence[int], num_prompt_tokens: int | None = None) -> None:
        """Restart the slot with a prompt, or with a prompt and the tokens generated after it."""
        ids = self._checked(token_ids)
        count = len(ids)
        if count > self.capacity:
            raise InvalidRequestError(f"a history of {count} tokens does not fit the capacity of {self.capacity}")
        num_prompt_tokens = count if num_prompt_tokens is None else num_prompt_tokens
        if not 0 <= num_prompt_tokens <= count:
            raise InvalidRequestError(f"num_prompt_tokens must be in [0, {count}], got {num_prompt_tokens}")
        if length := int(self.lengths[slot]):
            seen = self.tokens[slot, :length].to(torch.int64)
            self.last[slot, seen] = 0
            self.counts[slot, seen] = 0
        self.lengths[slot], self.num_prompt_tokens[slot] = 0, num_prompt_tokens
        self._append(slot, ids)
        if num_prompt_tokens < count:
            self._count(slot, ids[num_prompt_tokens:])

    def append(self, slots: Int[Tensor, "appended"], token_ids: Int[Tensor, "appended"]) -> None:
        """Append one generated token to each of several distinct slots, which must have room."""
        positions = self.lengths[slots]
        self.tokens[slots, positions] = token_ids.to(torch.int32)
        self.lengths[slots] += 1
        self.last[slots, token_ids] = self.lengths[slots].to(torch.int32)
        self.counts[slots, token_ids] += 1

    def extend(self, slot: int, token_ids: Sequence[int]) -> None:
        """Append generated tokens, in order, to one slot that has room for them."""
        ids = self._checked(token_ids)
        self._append(slot, ids)
        self._count(slot, ids)

    def _append(self, slot: int, ids: Int[Tensor, "tokens"]) -> None:
        start = int(self.lengths[slot])
        end = start + len(ids)
        self.tokens[slot, start:end] = ids.to(torch.int32)
        self.lengths[slot] = end
        self.last[slot].scatter_reduce_(
            0, ids, torch.arange(start + 1, end + 1, dtype=torch.int32, device=ids.device), "amax"
        )

    def _count(self, slot: int, ids: Int[Tensor, "output"]) -> None:
        self.counts[slot].index_add_(0, ids, torch.ones_like(ids, dtype=torch.int32))

    def _checked(self, token_ids: Sequence[int]) -> Int[Tensor, "tokens"]:
        for each in (min(token_ids), max(token_ids)) if token_ids else ():
            if not 0 <= each < self.vocab_size:
                raise InvalidRequestError(
                    f"the context: token id must be in [0, {self.vocab_size}), the vocabulary, got {each}"
                )
        return torch.tensor(token_ids, dtype=torch.int64, device=self.lengths.device)


def remember(
    history: History | None, columns: SamplingColumns, rows: Sequence[int], token_ids: Int[Tensor, "all"]
) -> None:
    """Append the tokens of the given rows that have a penalty. `token_ids` contains the tokens of all rows."""
    if history is None or not columns.has_penalty:
        return
    index = torch.tensor(rows, dtype=torch.int64, device=columns.device)
    index = index[columns.history_slot[index] >= 0]
    history.append(columns.history_slot[index], token_ids[index])


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """Return zeros. On the host, unlike torch's zeros, the memory is allocated when it is first written."""
    if torch.device(device).type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.from_numpy(np.zeros(shape, np.int32 if dtype == torch.int32 else np.int64))
