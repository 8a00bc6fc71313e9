"""What every sampling kernel is handed: the logits, each row's parameters as one line of 64-bit fields, the edits.

A field holds an integer, or the bits of a float: one short line a row in place of a dozen columns in as many places.
The lines are made once per `Rows` and live as long as it does, where they are: a captured graph may keep their address.
"""

from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import triton
import triton.language as tl
from torch import Tensor

from infer.sampling.columns import Rows
from infer.sampling.history import History

FIELDS = (
    "temperature",
    "temperature_last",
    "top_k",
    "top_p",
    "log_min_p",
    "is_filtered",
    "seed",
    "first_free_position",  # the row's ends are banned before it
    "mask_index",
    "history_slot",
    "repetition_penalty",
    "repetition_window",
    "frequency_penalty",
    "presence_penalty",
    "bias_start",
    "bias_stop",
    "end_start",
    "end_stop",
)
NUM_FIELDS = tl.constexpr(len(FIELDS))
TEMPERATURE = tl.constexpr(FIELDS.index("temperature"))
TEMPERATURE_LAST = tl.constexpr(FIELDS.index("temperature_last"))
TOP_K = tl.constexpr(FIELDS.index("top_k"))
TOP_P = tl.constexpr(FIELDS.index("top_p"))
LOG_MIN_P = tl.constexpr(FIELDS.index("log_min_p"))
IS_FILTERED = tl.constexpr(FIELDS.index("is_filtered"))
SEED = tl.constexpr(FIELDS.index("seed"))
FIRST_FREE_POSITION = tl.constexpr(FIELDS.index("first_free_position"))
MASK_INDEX = tl.constexpr(FIELDS.index("mask_index"))
HISTORY_SLOT = tl.constexpr(FIELDS.index("history_slot"))
REPETITION_PENALTY = tl.constexpr(FIELDS.index("repetition_penalty"))
REPETITION_WINDOW = tl.constexpr(FIELDS.index("repetition_window"))
FREQUENCY_PENALTY = tl.constexpr(FIELDS.index("frequency_penalty"))
PRESENCE_PENALTY = tl.constexpr(FIELDS.index("presence_penalty"))
BIAS_START = tl.constexpr(FIELDS.index("bias_start"))
BIAS_STOP = tl.constexpr(FIELDS.index("bias_stop"))
END_START = tl.constexpr(FIELDS.index("end_start"))
END_STOP = tl.constexpr(FIELDS.index("end_stop"))


class Batch(NamedTuple):
    """The arguments that all kernels share. Tensors that nobody reads are `fields`, so that each is a pointer."""

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


def make_batch(logits: Tensor, rows: Rows, history: History | None, positions: Tensor, allowed: Tensor | None) -> Batch:
    fields = fields_of(rows)
    has_history = rows.has_penalty and history is not None
    return Batch(
        logits=logits,
        row_stride=logits.stride(0),
        vocab_size=rows.vocab_size,
        fields=fields,
        positions=positions,
        allowed=fields if allowed is None else allowed,
        allowed_stride=0 if allowed is None else allowed.stride(0),
        masks=rows.masks if rows.has_mask else fields,
        num_words=rows.masks.shape[1],
        bias_ids=rows.bias_ids if rows.has_bias else fields,
        biases=rows.biases if rows.has_bias else fields,
        end_ids=rows.end_ids if rows.has_min_new_tokens else fields,
        last=history.last if has_history and history else fields,
        counts=history.counts if has_history and history else fields,
        lengths=history.lengths if has_history and history else fields,
    )


_fields_by_rows: WeakKeyDictionary[Rows, Tensor] = WeakKeyDictionary()


def fields_of(rows: Rows) -> Tensor:
    """int64 [rows, fields]. Greedy rows have no filter."""
    known = _fields_by_rows.get(rows)
    if known is not None:
        return known
    is_sampled = rows.temperature != 0
    top_k = torch.where(is_sampled, rows.top_k, 0)
    top_p = torch.where(is_sampled, rows.top_p, 1.0)
    log_min_p = torch.where(is_sampled, rows.log_min_p, -torch.inf)
    column_by_name = {
        "temperature": _bits(rows.temperature),
        "temperature_last": rows.temperature_last.to(torch.int64),
        "top_k": top_k,
        "top_p": top_p.view(torch.int64),
        "log_min_p": _bits(log_min_p),
        "is_filtered": ((top_k > 0) | (top_p < 1) | (log_min_p > -torch.inf)).to(torch.int64),
        "seed": rows.seed,
        "first_free_position": rows.num_prompt_tokens + rows.min_new_tokens,
        "mask_index": rows.mask_index,
        "history_slot": rows.history_slot,
        "repetition_penalty": _bits(rows.repetition_penalty),
        "repetition_window": rows.repetition_window,
        "frequency_penalty": _bits(rows.frequency_penalty),
        "presence_penalty": _bits(rows.presence_penalty),
        "bias_start": rows.bias_starts[:-1],
        "bias_stop": rows.bias_starts[1:],
        "end_start": rows.end_starts[:-1],
        "end_stop": rows.end_starts[1:],
    }
    fields = torch.stack([column_by_name[name] for name in FIELDS], dim=1).contiguous()
    _fields_by_rows[rows] = fields
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
