"""The sampling parameters of all slots as columns, and the history of their tokens if parameters need it."""

from collections.abc import Sequence as Items
from typing import final

from infer.compute.sampling.columns import SamplingColumns, uses_history
from infer.compute.sampling.history import History
from infer.engine.runner.runner import Runner
from infer.engine.step.sequence import Sequence


@final
class SlotParams:
    """Columns and history, for the engine only. Both are created when a sequence first needs them."""

    def __init__(self, runner: Runner) -> None:
        self._num_slots, self._device = runner.num_slots, runner.model.device
        self._max_seq_len = runner.model.max_seq_len
        self._columns: SamplingColumns | None = None
        self.history: History | None = None
        self._stale: list[Sequence] = []  # sequences whose history contains dropped tokens

    def write(self, sequence: Sequence) -> None:
        """Write the parameters of a sequence that has got its slot."""
        request, device = sequence.request, self._device
        if self._columns is None:
            end_ids = request.tokenizer.eos_token_ids
            self._columns = SamplingColumns(self._num_slots, request.vocab_size, end_ids=end_ids, device=device)
        self._columns.write(sequence.slot, sequence.params, sequence.num_prompt_tokens)
        if uses_history(sequence.params):
            if self.history is None:
                self.history = History(self._num_slots, self._max_seq_len, request.vocab_size, device)
            self._begin_history(self.history, sequence)

    def select(self, sequences: Items[Sequence]) -> SamplingColumns:
        """Return the columns for a step of these sequences."""
        assert self._columns is not None
        self._columns.select([sequence.slot for sequence in sequences])
        return self._columns

    def extend(self, sequence: Sequence, token_ids: Items[int]) -> None:
        """Append tokens that a sequence accepted without sampling."""
        if token_ids and self.history is not None and uses_history(sequence.params):
            self.history.extend(sequence.slot, token_ids)

    def mark_stale(self, sequence: Sequence) -> None:
        """Note that sampled tokens of a sequence were dropped. `renew` then rebuilds its history."""
        self._stale.append(sequence)

    def renew(self) -> None:
        for sequence in self._stale:
            if self.history is not None and uses_history(sequence.params):
                self._begin_history(self.history, sequence)
        self._stale.clear()

    def clear(self) -> None:
        """Free the memory."""
        self._columns = self.history = None
        self._stale.clear()

    def _begin_history(self, history: History, sequence: Sequence) -> None:
        history.begin(sequence.slot, sequence.token_ids, sequence.num_prompt_tokens)
