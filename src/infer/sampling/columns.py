"""`SamplingParams` stacked into columns: entry i of each is row i's value, packed once when the batch changes.

A column holds the exact identity where its knob is off, and host booleans say which passes any row needs: a step reads
nothing back from the device to decide what to run. Values are checked here, once: token ids against the vocabulary.
"""

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property, partial
from itertools import accumulate
from typing import Self, final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from infer.errors import InvalidRequestError
from infer.sampling.noise import signed
from infer.sampling_params import SamplingParams

WHOLE_HISTORY = 1 << 62  # the repetition window that is off
SMALLEST_TOP_P = (
    2e-7  # keeps the likeliest token alone, as anything below does; less the margin of `integer_probs`, above 0
)
MASK_BITS = 32  # tokens per word of a packed mask, the lowest bit first
_SMALLEST, _LARGEST = torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max


@final
@dataclass(frozen=True, eq=False)
class Rows:
    """The columns of a batch. Lists of ids are ragged: row i owns entries starts[i] to starts[i + 1]."""

    vocab_size: int
    temperature: Float[Tensor, "rows"]  # 0 is greedy
    top_k: Int[Tensor, "rows"]  # 0 is off
    top_p: Float[Tensor, "rows"]  # float64
    log_min_p: Float[Tensor, "rows"]  # −inf is off
    repetition_penalty: Float[Tensor, "rows"]
    repetition_window: Int[Tensor, "rows"]
    frequency_penalty: Float[Tensor, "rows"]
    presence_penalty: Float[Tensor, "rows"]
    temperature_last: Bool[Tensor, "rows"]
    seed: Int[Tensor, "rows"]  # 64 bits, as a signed number
    num_prompt_tokens: Int[Tensor, "rows"]
    min_new_tokens: Int[Tensor, "rows"]
    history_slot: Int[Tensor, "rows"]  # which slot of the History is the row's; −1 for rows without penalties
    bias_starts: Int[Tensor, "starts"]
    bias_ids: Int[Tensor, "biases"]
    biases: Float[Tensor, "biases"]  # float64, finite or −inf
    end_starts: Int[Tensor, "starts"]
    end_ids: Int[Tensor, "ends"]  # EOS and stop ids, banned until the minimum length
    mask_index: Int[Tensor, "rows"]  # which of `masks` the row has; −1 for none
    masks: Int[Tensor, "masks words"]  # int32, one bit per token: `allowed_token_ids` and ids with a bias of +inf
    num_logprobs: tuple[int | None, ...]  # per row: alternatives asked for, None for no log-probabilities
    is_processed: tuple[bool, ...]  # per row: log-probabilities of the processed logits

    @classmethod
    def pack(
        cls,
        params: Sequence[SamplingParams],
        vocab_size: int,
        *,
        num_prompt_tokens: Sequence[int] | None = None,
        end_ids: Collection[int] = (),
        slots: Sequence[int] | None = None,
        device: torch.device | str = "cpu",
    ) -> Self:
        """One row per entry of params, each of which must carry a seed unless it is greedy.

        `end_ids` are the model's EOS ids. Rows with a penalty have the history slots of their entries in `slots`, by
        default 0, 1, … in order. Raises InvalidRequestError for a token id outside the vocabulary or a missing seed.
        """
        prompts = [0] * len(params) if num_prompt_tokens is None else list(num_prompt_tokens)
        if len(prompts) != len(params) or any(number < 0 for number in prompts):
            raise InvalidRequestError(f"num_prompt_tokens must be {len(params)} counts, one a row, got {prompts}")
        for row in params:
            _check(row, vocab_size)
        if slots is None:
            slots = _numbered([uses_history(row) for row in params])
        allowed = [_allowed(row) for row in params]
        biases = [_finite_biases(row) for row in params]
        ends = [_end_ids(row, end_ids, vocab_size) if row.min_new_tokens else [] for row in params]
        column = partial(torch.tensor, dtype=torch.int64, device=device)
        scalars = {
            name: torch.tensor([value_of(row) for row in params], dtype=dtype, device=device)
            for name, (dtype, value_of) in _SCALARS.items()
        }
        return cls(
            vocab_size=vocab_size,
            **scalars,
            top_k=column([row.top_k if row.top_k and row.top_k < vocab_size else 0 for row in params]),
            num_prompt_tokens=column(prompts),
            history_slot=column([slot if uses_history(row) else -1 for slot, row in zip(slots, params, strict=True)]),
            bias_starts=column([0, *accumulate(map(len, biases))]),
            bias_ids=column([token_id for row in biases for token_id, _ in row]),
            biases=torch.tensor([bias for row in biases for _, bias in row], dtype=torch.float64, device=device),
            end_starts=column([0, *accumulate(map(len, ends))]),
            end_ids=column([token_id for row in ends for token_id in row]),
            mask_index=column(_numbered([ids is not None for ids in allowed])),
            masks=pack_masks([ids for ids in allowed if ids is not None], vocab_size).to(device),
            num_logprobs=tuple(row.logprobs for row in params),
            is_processed=tuple(row.logprobs_mode == "processed" for row in params),
        )

    def __len__(self) -> int:
        return len(self.num_logprobs)

    @property
    def device(self) -> torch.device:
        return self.temperature.device

    def repeat(self, n: int, seeds: Sequence[int]) -> Self:
        """n samples of one row's prompt: its values n times, each with a seed of its own.

        Penalised rows share nothing afterwards: copy i has history slot i.
        """
        if len(self) != 1 or n < 1 or len(seeds) != n:
            raise InvalidRequestError(f"repeat takes 1 row, n of at least 1 and n seeds, got {len(self)}, {n}, {seeds}")
        ragged = {"bias_starts", "bias_ids", "biases", "end_starts", "end_ids", "masks"}
        columns = {
            field.name: getattr(self, field.name).repeat(n)
            for field in fields(self)
            if field.name not in ragged and isinstance(getattr(self, field.name), Tensor)
        }
        columns["seed"] = torch.tensor([signed(seed) for seed in seeds], device=self.device)
        if self.has_penalty:
            columns["history_slot"] = torch.arange(n, device=self.device)
        counts = {"bias": len(self.bias_ids), "end": len(self.end_ids)}
        for name, count in counts.items():
            columns[f"{name}_starts"] = torch.arange(n + 1, device=self.device) * count
        columns |= {name: getattr(self, name).repeat(n) for name in ("bias_ids", "biases", "end_ids")}
        return replace(self, **columns, num_logprobs=self.num_logprobs * n, is_processed=self.is_processed * n)

    # Which passes any row needs, and which rows: read from the device once, when first asked for.

    @cached_property
    def has_greedy(self) -> bool:
        return bool((self.temperature == 0).any())

    @cached_property
    def has_sampled(self) -> bool:
        return bool((self.temperature != 0).any())

    @cached_property
    def has_penalty(self) -> bool:
        return len(self.penalised) > 0

    @cached_property
    def penalised(self) -> Int[Tensor, "penalised"]:
        """Rows that have a history slot."""
        return (self.history_slot >= 0).nonzero()[:, 0]

    @cached_property
    def has_bias(self) -> bool:
        return len(self.bias_ids) > 0

    @cached_property
    def has_mask(self) -> bool:
        return len(self.masks) > 0

    @cached_property
    def has_min_new_tokens(self) -> bool:
        return len(self.end_ids) > 0

    @cached_property
    def has_edits(self) -> bool:
        """Whether any row's logits change before the temperature."""
        return self.has_penalty or self.has_bias or self.has_mask or self.has_min_new_tokens

    @cached_property
    def max_top_k(self) -> int:
        """The largest k of a sampled row; 0 if none has one."""
        return int(torch.where(self.temperature != 0, self.top_k, 0).max()) if len(self) else 0

    @cached_property
    def with_top_p(self) -> Int[Tensor, "filtered"]:
        """Sampled rows with a top-p."""
        return ((self.top_p < 1) & (self.temperature != 0)).nonzero()[:, 0]

    @cached_property
    def has_min_p(self) -> bool:
        return bool(((self.log_min_p > -math.inf) & (self.temperature != 0)).any())

    @cached_property
    def has_temperature(self) -> bool:
        return bool(((self.temperature != 0) & (self.temperature != 1)).any())

    @cached_property
    def has_temperature_last(self) -> bool:
        return bool(self.temperature_last.any())

    @cached_property
    def all_temperature_last(self) -> bool:
        return bool(self.temperature_last.all())

    @cached_property
    def bias_rows(self) -> Int[Tensor, "biases"]:
        return self._owners(self.bias_starts)

    @cached_property
    def end_rows(self) -> Int[Tensor, "ends"]:
        return self._owners(self.end_starts)

    def _owners(self, starts: Int[Tensor, "starts"]) -> Int[Tensor, "entries"]:
        return torch.repeat_interleave(torch.arange(len(self), device=self.device), starts.diff())


def uses_history(params: SamplingParams) -> bool:
    """Whether the row's logits depend on what it has seen."""
    repeats = params.repetition_penalty != 1 and params.repetition_window != 0
    return repeats or params.frequency_penalty != 0 or params.presence_penalty != 0


def pack_masks(allowed: Sequence[Collection[int]], vocab_size: int) -> Int[Tensor, "masks words"]:
    """One bit per token id, 32 to an int32, the lowest bit first: the layout that grammar libraries fill."""
    bits = torch.zeros(len(allowed), num_mask_words(vocab_size) * MASK_BITS, dtype=torch.bool)
    for row, token_ids in enumerate(allowed):
        bits[row, torch.tensor(sorted(token_ids), dtype=torch.int64)] = True
    return pack_bits(bits)


def num_mask_words(vocab_size: int) -> int:
    return -(-vocab_size // MASK_BITS)


def pack_bits(bits: Bool[Tensor, "masks padded"]) -> Int[Tensor, "masks words"]:
    """The last axis, a multiple of 32 long, as int32 words."""
    shifts = torch.arange(MASK_BITS, device=bits.device)
    words = (bits.view(*bits.shape[:-1], bits.shape[-1] // MASK_BITS, MASK_BITS).to(torch.int64) << shifts).sum(-1)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


def unpack_bits(words: Int[Tensor, "masks words"], vocab_size: int) -> Bool[Tensor, "masks vocab"]:
    shifts = torch.arange(MASK_BITS, device=words.device, dtype=torch.int32)
    return (words[..., None] >> shifts & 1).bool().flatten(-2)[..., :vocab_size]


def _check(params: SamplingParams, vocab_size: int) -> None:
    if not params.is_greedy and params.seed is None:
        raise InvalidRequestError("a row that is sampled needs a seed: draw one and report it")
    for name in ("logit_bias", "allowed_token_ids", "stop_token_ids"):
        for token_id in getattr(params, name) or ():
            if not 0 <= token_id < vocab_size:
                raise InvalidRequestError(
                    f"{name}: token id must be in [0, {vocab_size}), the vocabulary, got {token_id}"
                )


def _divisor(value: float) -> float:
    return min(max(value, _SMALLEST), _LARGEST)


def _count(value: int) -> int:
    """As far as a column holds it, which is further than any context."""
    return min(value, WHOLE_HISTORY)


def _allowed(params: SamplingParams) -> Collection[int] | None:
    """What `allowed_token_ids` and biases of +inf leave, None for everything."""
    forced = {token_id for token_id, bias in (params.logit_bias or {}).items() if bias == math.inf}
    if params.allowed_token_ids is None:
        return forced or None
    return forced & set(params.allowed_token_ids) if forced else params.allowed_token_ids


def _finite_biases(params: SamplingParams) -> list[tuple[int, float]]:
    biases = params.logit_bias or {}
    return [(token_id, bias) for token_id, bias in sorted(biases.items()) if bias != math.inf]


def _end_ids(params: SamplingParams, end_ids: Collection[int], vocab_size: int) -> list[int]:
    return sorted(i for i in {*end_ids, *(params.stop_token_ids or ())} if 0 <= i < vocab_size)


def _numbered(is_counted: Sequence[bool]) -> list[int]:
    """0, 1, … for those that count, −1 for the others."""
    numbers = accumulate(is_counted, initial=-1)
    next(numbers)
    return [number if counts else -1 for number, counts in zip(numbers, is_counted, strict=True)]


_SCALARS: dict[str, tuple[torch.dtype, Callable[[SamplingParams], float]]] = {
    "temperature": (torch.float32, lambda row: _divisor(row.temperature) if row.temperature else 0.0),
    "top_p": (torch.float64, lambda row: max(row.top_p, SMALLEST_TOP_P)),
    "log_min_p": (torch.float32, lambda row: math.log(row.min_p) if row.min_p else -math.inf),
    "repetition_penalty": (torch.float32, lambda row: _divisor(row.repetition_penalty)),
    "repetition_window": (
        torch.int64,
        lambda row: WHOLE_HISTORY if row.repetition_window is None else _count(row.repetition_window),
    ),
    "frequency_penalty": (torch.float32, lambda row: row.frequency_penalty),
    "presence_penalty": (torch.float32, lambda row: row.presence_penalty),
    "temperature_last": (torch.bool, lambda row: row.temperature_last),
    "seed": (torch.int64, lambda row: signed(row.seed or 0)),
    "min_new_tokens": (torch.int64, lambda row: _count(row.min_new_tokens)),
}
