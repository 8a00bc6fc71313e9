"""Arguments of every sampling kernel: the logits, each row's parameters as one line of 64-bit fields, the edits.

A field holds an integer, or the bits of a float. One short line per row replaces a dozen columns in as many places. The
lines are made once per selection, and stay where they are while the columns live, so a captured graph may keep their
address.
"""

from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import triton
import triton.language as tl
from jaxtyping import Int
from torch import Tensor

from infer.sampling.columns import SamplingColumns
from infer.sampling.history import History

(
    TEMPERATURE,
    TEMPERATURE_LAST,
    TOP_K,
    TOP_P,
    LOG_MIN_P,
    IS_FILTERED,
    SEED,
    FIRST_FREE_POSITION,  # the row's ends are banned before it
    MASK_INDEX,
    HISTORY_SLOT,
    REPETITION_PENALTY,
    REPETITION_WINDOW,
    FREQUENCY_PENALTY,
    PRESENCE_PENALTY,
    BIAS_START,
    BIAS_STOP,
    END_START,
    END_STOP,
    NUM_DRAFTS,  # of the row before this line: its history ends with them
    NUM_TOP,  # alternatives beside its log-probability; −1: none is asked for
    IS_PROCESSED,  # log-probabilities are of what the filters leave
) = map(tl.constexpr, range(21))  # places of the fields in a row's line
NUM_FIELDS = tl.constexpr(21)


class Batch(NamedTuple):
    """Arguments that all kernels share. Tensors that are not read are `fields`, so that each argument is a pointer."""

    logits: Any
    row_stride: Any
    vocab_size: Any
    fields: Any
    positions: Any
    allowed: Any
    allowed_stride: Any
    masks: Any
    num_words: Any
    bias_ids: Any
    biases: Any
    end_ids: Any
    last: Any
    counts: Any
    lengths: Any
    drafts: Any


class Lines(NamedTuple):
    """Lines of logits that verify drafts, grouped by row."""

    rows: Int[Tensor, "lines"]  # whose a line is
    entries: Int[Tensor, "lines"]  # how many drafts of its row come before it
    drafts: Int[Tensor, "lines"]  # what is drafted after it


class Seen(NamedTuple):
    """A history's tensors."""

    tokens: Tensor
    last: Tensor
    counts: Tensor
    lengths: Tensor


def seen_of(columns: SamplingColumns, history: History | None) -> Seen | None:
    """Return the history's tensors; None if no row has a penalty."""
    if history is None or not columns.has_penalty:
        return None
    return Seen(history.tokens, history.last, history.counts, history.lengths)


def make_batch(
    logits: Tensor,
    columns: SamplingColumns,
    history: History | None,
    positions: Tensor,
    allowed: Tensor | None,
    lines: Lines | None,
) -> Batch:
    """Return the kernels' arguments. Without `lines`, each row has one line."""
    fields = fields_of(columns)
    if lines is not None:
        fields = fields[lines.rows]
        fields[:, NUM_DRAFTS.value] = lines.entries
    seen = seen_of(columns, history) or Seen(fields, fields, fields, fields)
    return Batch(
        logits=logits,
        row_stride=logits.stride(0),
        vocab_size=columns.vocab_size,
        fields=fields,
        positions=positions,
        allowed=fields if allowed is None else allowed,
        allowed_stride=0 if allowed is None else allowed.stride(0),
        masks=columns.masks if columns.has_mask else fields,
        num_words=columns.masks.shape[1],
        bias_ids=columns.bias_ids if columns.has_bias else fields,
        biases=columns.biases if columns.has_bias else fields,
        end_ids=columns.end_ids if columns.has_min_new_tokens else fields,
        last=seen.last,
        counts=seen.counts,
        lengths=seen.lengths,
        drafts=fields if lines is None else lines.drafts,
    )


_fields_by_columns: WeakKeyDictionary[SamplingColumns, tuple[object, Tensor]] = WeakKeyDictionary()


def fields_of(columns: SamplingColumns) -> Tensor:
    """Return int64 [slots, fields], with one line written per row. Greedy rows have no filter."""
    selection, fields = _fields_by_columns.get(columns, (None, None))
    if fields is None:
        fields = torch.empty(columns.num_slots, NUM_FIELDS.value, dtype=torch.int64, device=columns.device)
    if selection is columns.selection:
        return fields
    is_sampled = columns.temperature != 0
    top_k = torch.where(is_sampled, columns.top_k, 0)
    top_p = torch.where(is_sampled, columns.top_p, 1.0)
    log_min_p = torch.where(is_sampled, columns.log_min_p, -torch.inf)
    column_by_field = {
        TEMPERATURE.value: _bits(columns.temperature),
        TEMPERATURE_LAST.value: columns.temperature_last.to(torch.int64),
        TOP_K.value: top_k,
        TOP_P.value: top_p.view(torch.int64),
        LOG_MIN_P.value: _bits(log_min_p),
        IS_FILTERED.value: ((top_k > 0) | (top_p < 1) | (log_min_p > -torch.inf)).to(torch.int64),
        SEED.value: columns.seed,
        FIRST_FREE_POSITION.value: columns.num_prompt_tokens + columns.min_new_tokens,
        MASK_INDEX.value: columns.mask_index,
        HISTORY_SLOT.value: columns.history_slot,
        REPETITION_PENALTY.value: _bits(columns.repetition_penalty),
        REPETITION_WINDOW.value: columns.repetition_window,
        FREQUENCY_PENALTY.value: _bits(columns.frequency_penalty),
        PRESENCE_PENALTY.value: _bits(columns.presence_penalty),
        BIAS_START.value: columns.bias_starts[:-1],
        BIAS_STOP.value: columns.bias_starts[1:],
        END_START.value: columns.end_starts[:-1],
        END_STOP.value: columns.end_starts[1:],
        NUM_DRAFTS.value: torch.zeros_like(columns.seed),
        NUM_TOP.value: columns.top_logprobs,
        IS_PROCESSED.value: columns.logprobs_processed.to(torch.int64),
    }
    torch.stack([column_by_field[field] for field in range(NUM_FIELDS.value)], dim=1, out=fields[: len(columns)])
    _fields_by_columns[columns] = columns.selection, fields
    return fields


def _bits(column: Tensor) -> Tensor:
    return column.contiguous().view(torch.int32).to(torch.int64)


@triton.jit
def integer(batch, row, field: tl.constexpr):
    return tl.load(batch.fields + row * NUM_FIELDS + field)


@triton.jit
def single(batch, row, field: tl.constexpr):
    return integer(batch, row, field).to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def double(batch, row, field: tl.constexpr):
    return integer(batch, row, field).to(tl.float64, bitcast=True)
