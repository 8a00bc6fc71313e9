"""`SamplingParams` as columns: a sequence's values are written once for its slot, then gathered for a step's slots.

A column has the exact identity value if its parameter is off, and keeps its address, which kernels store. Only lists
of ids and masks are created anew. The host knows which stages a step needs, so nothing is read back from the device.
Values are checked when they are written: token ids against the vocabulary.
"""

import math
from collections.abc import Callable, Collection, Sequence
from itertools import accumulate, groupby
from typing import Any, NamedTuple, Self, final

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Float, Int
from torch import Tensor

from infer.compute.sampling.masks import num_mask_words, pack_masks
from infer.compute.sampling.row_stages import FILTERS, allowed_ids, filter_numbers, filters_in_use
from infer.errors import InvalidRequestError
from infer.sampling_params import SamplingParams, signed

WHOLE_HISTORY = 1 << 62  # a repetition window that covers everything
_SMALLEST, _LARGEST = torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max
_TORCH = {np.float32: torch.float32, np.float64: torch.float64, np.int64: torch.int64, np.bool_: torch.bool}


class _Slot(NamedTuple):
    """The arguments of `write` for a slot."""

    number: int
    params: SamplingParams
    num_prompt_tokens: int
    vocab_size: int


class _Lists(NamedTuple):
    """Parameters of a slot, and its lists and mask: its values that are not in a column."""

    params: SamplingParams = SamplingParams(temperature=0)
    biases: Sequence[tuple[int, float]] = ()
    end_ids: Sequence[int] = ()
    mask: Int[Tensor, "mask words"] | None = None


@final
class _Column:
    """One number per row, computed by `of` from the row's slot. As an attribute it is a tensor over the rows."""

    def __init__(self, dtype: npt.DTypeLike, of: Callable[[_Slot], float], name: str = "") -> None:
        self.dtype, self.of, self.name = np.dtype(dtype), of, name

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, columns: "SamplingColumns", owner: type) -> Tensor:
        return columns.whole[self.name][: len(columns)]


def _filter_column(name: str) -> _Column:
    """Return the column of a filter, which has the parameter's name: `FILTERS` says what its number is."""
    return _Column(np.float64, lambda slot: filter_numbers(slot.params, slot.vocab_size)[name], name)


class _Group(NamedTuple):
    """Columns of one type, which are gathered in one operation."""

    columns: Sequence[_Column]
    of_slots: npt.NDArray[Any]  # [columns, slots]
    of_rows: npt.NDArray[Any]  # [columns, slots or more]: one valid entry per row


@final
class SamplingColumns:
    """Sampling parameters of the rows of a step, as tensors.

    A row is a selected slot; none is selected at first. Lists of ids are ragged: row i owns entries starts[i] to
    starts[i + 1]. A slot that was never written is greedy.
    """

    # One number per row. There is also a column for each of `FILTERS`, in `whole` and `on_host`.
    temperature = _Column(np.float32, lambda slot: _temperature(slot.params.temperature))  # 0 is greedy
    is_filtered = _Column(np.bool_, lambda slot: len(filters_in_use(slot.params, slot.vocab_size)) > 0)
    repetition_penalty = _Column(np.float32, lambda slot: _divisor(slot.params.repetition_penalty))
    repetition_window = _Column(np.int64, lambda slot: _count(slot.params.repetition_window))
    frequency_penalty = _Column(np.float32, lambda slot: slot.params.frequency_penalty)
    presence_penalty = _Column(np.float32, lambda slot: slot.params.presence_penalty)
    temperature_last = _Column(np.bool_, lambda slot: slot.params.temperature_last)
    seed = _Column(np.int64, lambda slot: signed(slot.params.seed or 0))  # 64 bits, as a signed number
    num_prompt_tokens = _Column(np.int64, lambda slot: slot.num_prompt_tokens)
    min_new_tokens = _Column(np.int64, lambda slot: _count(slot.params.min_new_tokens))
    history_slot = _Column(np.int64, lambda slot: slot.number if uses_history(slot.params) else -1)  # −1: no penalties
    mask_index = _Column(np.int64, lambda slot: -1)  # index of the row's mask in `masks`; −1 for none
    top_logprobs = _Column(np.int64, lambda slot: -1 if slot.params.logprobs is None else slot.params.logprobs)
    logprobs_processed = _Column(np.bool_, lambda slot: slot.params.logprobs_mode == "processed")

    bias_ids: Int[Tensor, "biases"]
    biases: Float[Tensor, "biases"]  # float64, finite or −inf
    end_ids: Int[Tensor, "ends"]  # EOS and stop ids, banned until the minimum length
    masks: Int[Tensor, "masks words"]  # int32, one bit per token: `allowed_token_ids` and ids with a bias of +inf
    params: tuple[SamplingParams, ...]  # per row: what was written
    num_logprobs: tuple[int | None, ...]  # per row: requested alternatives; None: no log-probabilities
    has_logprobs: bool  # a row requests log-probabilities
    selection: object  # a new object after each change of the selection, for users that cache derived values
    whole: dict[str, Tensor]  # each column with room for all slots, at a fixed address

    def __init__(
        self, num_slots: int, vocab_size: int, *, end_ids: Collection[int] = (), device: torch.device | str = "cpu"
    ) -> None:
        """Allocate the columns. `end_ids` are the model's EOS ids."""
        self.num_slots, self.vocab_size, self.device = num_slots, vocab_size, torch.device(device)
        self.eos_token_ids = frozenset(each for each in end_ids if 0 <= each < vocab_size)
        columns = [*(c for c in vars(type(self)).values() if isinstance(c, _Column)), *map(_filter_column, FILTERS)]
        columns.sort(key=lambda column: column.dtype.str)
        # One line per column and per list's starts, so that one copy brings all of them to the device.
        lines = np.zeros((len(columns) + 2, num_slots + 1), np.int64)
        self._on_host = torch.from_numpy(lines)
        self._on_device = self._on_host.to(self.device)
        self._bias_starts, self._end_starts = lines[-2:]
        self.whole = {"bias_starts": self._on_device[-2], "end_starts": self._on_device[-1]}
        self._host, self._groups = dict[str, npt.NDArray[Any]](), list[_Group]()
        neutral = _Slot(-1, SamplingParams(temperature=0), 0, vocab_size)
        for dtype, each in groupby(columns, key=lambda column: column.dtype):
            group, first = list(each), len(self._host)
            names, mine = [column.name for column in group], slice(first, first + len(group))
            values = np.array([[column.of(neutral)] for column in group], dtype)
            self._groups.append(_Group(group, values.repeat(num_slots, axis=1), lines[mine].view(dtype)))
            self._host |= zip(names, lines[mine].view(dtype), strict=True)
            self.whole |= zip(names, self._on_device[mine].view(_TORCH[dtype.type]), strict=True)
        self._lists = [_Lists()] * num_slots
        self._has_lists = True  # so that the first, empty selection makes empty lists
        self._slots: tuple[int, ...] | None = None
        self.select(())

    @classmethod
    def of(
        cls,
        params: Sequence[SamplingParams],
        vocab_size: int,
        *,
        num_prompt_tokens: Sequence[int] | None = None,
        end_ids: Collection[int] = (),
        device: torch.device | str = "cpu",
    ) -> Self:
        """Return columns with one slot per entry of `params`, in their order, all selected.

        Raises InvalidRequestError as `write` does.
        """
        prompts = [0] * len(params) if num_prompt_tokens is None else list(num_prompt_tokens)
        if len(prompts) != len(params):
            raise InvalidRequestError(f"num_prompt_tokens must be {len(params)} counts, one a row, got {prompts}")
        columns = cls(len(params), vocab_size, end_ids=end_ids, device=device)
        for slot, (row, num_prompt) in enumerate(zip(params, prompts, strict=True)):
            columns.write(slot, row, num_prompt)
        columns.select(range(len(params)))
        return columns

    def write(self, slot: int, params: SamplingParams, num_prompt_tokens: int = 0) -> None:
        """Set the slot's values, from the next `select` on. `params` must carry a seed unless it is greedy.

        Raises InvalidRequestError, with the slot unchanged, for a token id outside the vocabulary, a missing seed or a
        negative count.
        """
        _check(params, self.vocab_size)
        if num_prompt_tokens < 0:
            raise InvalidRequestError(f"num_prompt_tokens must be at least 0, got {num_prompt_tokens}")
        entry = _Slot(slot, params, num_prompt_tokens, self.vocab_size)
        numbers = [[column.of(entry) for column in group.columns] for group in self._groups]
        lists = self._lists_of(params)
        self._slots = None
        for group, values in zip(self._groups, numbers, strict=True):
            group.of_slots[:, slot] = values
        self._lists[slot] = lists

    def select(self, slots: Sequence[int]) -> None:
        """Make row i the slot slots[i].

        Does nothing if the last selection was the same and no slot was written since.
        """
        slots = tuple(slots)
        if slots == self._slots:
            return
        self._slots = None  # until the selection is complete
        count, index, lists = len(slots), list(slots), [self._lists[slot] for slot in slots]
        for group in self._groups:
            group.of_rows[:, :count] = group.of_slots[:, index]
        self.params = tuple(each.params for each in lists)
        self.num_logprobs = tuple(each.logprobs for each in self.params)
        self.has_logprobs = any(each is not None for each in self.num_logprobs)
        has_lists = any(each.biases or each.end_ids or each.mask is not None for each in lists)
        if has_lists or self._has_lists:
            self._has_lists = True
            self._join(lists)
            self._has_lists = has_lists
        if self._on_device is not self._on_host:
            self._on_device.copy_(_ready_to_send(self._on_host, self.device), non_blocking=True)
        self.selection, self._slots = object(), slots

    def _join(self, lists: Sequence[_Lists]) -> None:
        """Concatenate the lists and masks of the rows."""
        biases = [bias for each in lists for bias in each.biases]
        end_ids = [token_id for each in lists for token_id in each.end_ids]
        self._bias_starts[:], self._end_starts[:] = len(biases), len(end_ids)
        self._bias_starts[: len(lists) + 1] = [0, *accumulate(len(each.biases) for each in lists)]
        self._end_starts[: len(lists) + 1] = [0, *accumulate(len(each.end_ids) for each in lists)]
        self._host["mask_index"][: len(lists)] = _numbered([each.mask is not None for each in lists])
        self.bias_ids = self._sent(torch.tensor([token_id for token_id, _ in biases], dtype=torch.int64))
        self.biases = self._sent(torch.tensor([bias for _, bias in biases], dtype=torch.float64))
        self.end_ids = self._sent(torch.tensor(end_ids, dtype=torch.int64))
        nothing = torch.zeros(0, num_mask_words(self.vocab_size), dtype=torch.int32)
        self.masks = self._sent(torch.cat([nothing, *(each.mask for each in lists if each.mask is not None)]))

    def _sent(self, tensor: Tensor) -> Tensor:
        return _ready_to_send(tensor, self.device).to(self.device, non_blocking=True)

    def __len__(self) -> int:
        return len(self.num_logprobs)

    def on_host(self, name: str) -> npt.NDArray[Any]:
        """Return a column as numbers on the host, one per row. The next `select` may overwrite them."""
        return self._host[name][: len(self)]

    @property
    def starts_on_host(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Starts of the rows' biases and of their ends on the host. Both have one entry more than there are rows."""
        return self._bias_starts[: len(self) + 1], self._end_starts[: len(self) + 1]

    # Stages that any row needs.

    @property
    def has_penalty(self) -> bool:
        return bool((self.on_host("history_slot") >= 0).any())

    @property
    def has_edits(self) -> bool:
        """True if any row's logits change before the temperature."""
        return len(self.bias_ids) > 0 or len(self.masks) > 0 or len(self.end_ids) > 0 or self.has_penalty

    @property
    def has_filters(self) -> bool:
        """True if a filter may ban tokens of any row. No sampler may ask another way."""
        return bool(self.on_host("is_filtered").any())

    def _lists_of(self, params: SamplingParams) -> _Lists:
        lists = _Lists(params)
        if params.min_new_tokens:
            lists = lists._replace(end_ids=sorted({*self.eos_token_ids, *(params.stop_token_ids or ())}))
        if biases := params.logit_bias:
            finite = [(token_id, bias) for token_id, bias in sorted(biases.items()) if bias != math.inf]
            lists = lists._replace(biases=finite)
        if (allowed := allowed_ids(params)) is not None:
            lists = lists._replace(mask=pack_masks([allowed], self.vocab_size))
        return lists


def uses_history(params: SamplingParams) -> bool:
    """Return True if the row's logits depend on its previous tokens."""
    repeats = params.repetition_penalty != 1 and params.repetition_window != 0
    return repeats or params.frequency_penalty != 0 or params.presence_penalty != 0


def _ready_to_send(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a tensor on the host from which a copy to the device need not wait for the steps that run there."""
    return tensor.pin_memory() if device.type == "cuda" else tensor


def _check(params: SamplingParams, vocab_size: int) -> None:
    if not params.is_greedy and params.seed is None:
        raise InvalidRequestError("a row that is sampled needs a seed: draw one and report it")
    for name in ("logit_bias", "allowed_token_ids", "stop_token_ids"):
        for token_id in getattr(params, name) or ():
            if not 0 <= token_id < vocab_size:
                raise InvalidRequestError(
                    f"{name}: token id must be in [0, {vocab_size}), the vocabulary, got {token_id}"
                )


def _temperature(value: float) -> float:
    return _divisor(value) if value else 0.0


def _divisor(value: float) -> float:
    return min(max(value, _SMALLEST), _LARGEST)


def _count(value: int | None) -> int:
    """Return the value as a column stores it, limited to a number beyond any context; None means all."""
    return WHOLE_HISTORY if value is None else min(value, WHOLE_HISTORY)


def _numbered(is_counted: Sequence[bool]) -> list[int]:
    """Return 0, 1, … for the entries that are True, and −1 for the others."""
    numbers = accumulate(is_counted, initial=-1)
    next(numbers)
    return [number if counts else -1 for number, counts in zip(numbers, is_counted, strict=True)]
