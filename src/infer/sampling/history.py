"""What penalised rows have seen, as tensors on the device: appended to and rolled back in O(1) per token.

    tokens[s, i]     the id at position i of slot s, prompt and output alike
    previous[s, i]   the position at which that id stood before, −1 for none
    last[s, id]      the last position of the id, −1 for never
    counts[s, id]    how often it stands in the output

An id is within the last N tokens iff last[s, id] ≥ length − N; an id's occurrence at i is its last iff last = i.
A slot takes 8 bytes per entry of the vocabulary and 8 per position (SmolLM2 at 2,048: 0.4 MB; 262,144 words: 2.1 MB).
Rows without penalties have no slot and take nothing.
"""

from collections.abc import Sequence
from typing import final

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from infer.errors import InvalidRequestError


@final
class History:
    """Slots of a fixed capacity. `lengths` and the tables are read by kernels and must stay where they are."""

    def __init__(self, num_slots: int, capacity: int, vocab_size: int, device: torch.device | str = "cpu") -> None:
        self.capacity, self.vocab_size = capacity, vocab_size
        self.tokens = torch.zeros(num_slots, capacity, dtype=torch.int32, device=device)
        self.previous = torch.full((num_slots, capacity), -1, dtype=torch.int32, device=device)
        self.last = torch.full((num_slots, vocab_size), -1, dtype=torch.int32, device=device)
        self.counts = torch.zeros(num_slots, vocab_size, dtype=torch.int32, device=device)
        self.lengths = torch.zeros(num_slots, dtype=torch.int64, device=device)
        self.num_prompt_tokens = torch.zeros(num_slots, dtype=torch.int64, device=device)

    @property
    def num_slots(self) -> int:
        return len(self.lengths)

    @property
    def num_bytes(self) -> int:
        return sum(x.nbytes for x in (self.tokens, self.previous, self.last, self.counts))

    def begin(self, slot: int, token_ids: Sequence[int], num_prompt_tokens: int | None = None) -> None:
        """Start the slot anew from a prompt, or from a prompt and what was generated after it."""
        ids = self._checked(token_ids)
        count = len(ids)
        if count > self.capacity:
            raise InvalidRequestError(f"a history of {count} tokens does not fit the capacity of {self.capacity}")
        num_prompt_tokens = count if num_prompt_tokens is None else num_prompt_tokens
        if not 0 <= num_prompt_tokens <= count:
            raise InvalidRequestError(f"num_prompt_tokens must be in [0, {count}], got {num_prompt_tokens}")
        positions = torch.arange(count, dtype=torch.int32, device=ids.device)
        # Sorted by id and then position, each entry follows the one before it of the same id.
        order = ids.sort(stable=True).indices
        sorted_ids, sorted_positions = ids[order], positions[order]
        follows = torch.zeros(count, dtype=torch.bool, device=ids.device)
        follows[1:] = sorted_ids[1:] == sorted_ids[:-1]
        before = torch.where(follows, sorted_positions.roll(1), -1)
        self.tokens[slot, :count] = ids.to(torch.int32)
        self.previous[slot, order] = before
        is_last = ~torch.cat([follows[1:], follows.new_zeros(min(count, 1))])
        self.last[slot].fill_(-1)
        self.last[slot, sorted_ids[is_last]] = sorted_positions[is_last]
        self.counts[slot].zero_()
        output = ids[num_prompt_tokens:]
        self.counts[slot].index_add_(0, output, torch.ones_like(output, dtype=torch.int32))
        self.lengths[slot], self.num_prompt_tokens[slot] = count, num_prompt_tokens

    def append(self, slots: Int[Tensor, "appended"], token_ids: Int[Tensor, "appended"]) -> None:
        """One generated token to each of some distinct slots, which must have room."""
        positions = self.lengths[slots]
        self.tokens[slots, positions] = token_ids.to(torch.int32)
        self.previous[slots, positions] = self.last[slots, token_ids]
        self.last[slots, token_ids] = positions.to(torch.int32)
        self.counts[slots, token_ids] += 1
        self.lengths[slots] += 1

    def extend(self, slot: int, token_ids: Sequence[int]) -> None:
        """Some generated tokens, one after the other, to a slot that has room for them."""
        ids, start = self._checked(token_ids), int(self.lengths[slot])
        before = self.last[slot, ids].tolist()
        seen: dict[int, int] = {}
        for index, token_id in enumerate(token_ids):
            before[index] = seen.get(token_id, before[index])
            seen[token_id] = start + index
        end = start + len(token_ids)
        self.tokens[slot, start:end] = ids.to(torch.int32)
        self.previous[slot, start:end] = torch.tensor(before, dtype=torch.int32, device=ids.device)
        self.last[slot, torch.tensor(list(seen), dtype=torch.int64, device=ids.device)] = torch.tensor(
            list(seen.values()), dtype=torch.int32, device=ids.device
        )
        self.counts[slot].index_add_(0, ids, torch.ones_like(ids, dtype=torch.int32))
        self.lengths[slot] = end

    def drop(self, slots: Int[Tensor, "dropped"], num_tokens: int) -> None:
        """Take back the last generated tokens of some distinct slots: those tables are as if they had never been."""
        for _ in range(num_tokens):
            positions = self.lengths[slots] - 1
            token_ids = self.tokens[slots, positions].to(torch.int64)
            self.last[slots, token_ids] = self.previous[slots, positions]
            self.counts[slots, token_ids] -= 1
            self.lengths[slots] = positions

    def is_within(
        self, slots: Int[Tensor, "penalised"], windows: Int[Tensor, "penalised"]
    ) -> Bool[Tensor, "penalised vocab"]:
        """Whether each id stands among the last tokens of its slot, as many as the window says."""
        last = self.last[slots]
        return (last >= 0) & (last >= (self.lengths[slots] - windows)[:, None])

    def _checked(self, token_ids: Sequence[int]) -> Int[Tensor, "tokens"]:
        ids = torch.as_tensor(token_ids, dtype=torch.int64, device=self.lengths.device).reshape(-1)
        outside = (ids < 0) | (ids >= self.vocab_size)
        if bool(outside.any()):
            raise InvalidRequestError(
                f"the context: token id must be in [0, {self.vocab_size}), the vocabulary, got {int(ids[outside][0])}"
            )
        return ids
