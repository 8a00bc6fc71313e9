"""Arguments of every sampling kernel: the logits, each row's parameters as one line of 64-bit fields, the edits.

A field holds an integer, or the bits of a float. One short line per row replaces a dozen columns in as many places. The
lines are made on the host, once per selection. `SelectedRows` keeps them at one address for captured graphs.
"""

from typing import Any, NamedTuple, Self
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor

from infer.compute.sampling.columns import SamplingColumns
from infer.compute.sampling.history import History
from infer.compute.sampling.masks import num_mask_words
from infer.compute.sampling.row_stages import FILTERS

(
    TEMPERATURE,
    TEMPERATURE_LAST,
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
    IS_UNUSED,  # the line is padding: nothing is sampled
) = map(tl.constexpr, range(19))  # places of the fields in a row's line
FILTER_FIELDS = {name: tl.constexpr(19 + index) for index, name in enumerate(FILTERS)}  # of float64 numbers
NUM_FIELDS = tl.constexpr(19 + len(FILTERS))


class Batch(NamedTuple):
    """Arguments that all kernels share. Each argument is a pointer of one type, even if it is not read."""

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


class ParameterLists(NamedTuple):
    """Lists and masks of the rows, one after the other. A row's line says which are its own."""

    bias_ids: Int[Tensor, "biases"]
    biases: Float[Tensor, "biases"]
    end_ids: Int[Tensor, "ends"]
    masks: Int[Tensor, "masks words"]

    @classmethod
    def of(cls, columns: SamplingColumns) -> Self:
        return cls(columns.bias_ids, columns.biases, columns.end_ids, columns.masks)


class Stages(NamedTuple):
    """The optional stages in which a row takes part. They decide which kernels run, and how these are compiled."""

    has_filters: bool
    has_top_p: bool
    has_edits: bool
    has_history: bool

    @classmethod
    def of(cls, columns: SamplingColumns, history: History | None) -> Self:
        return cls(
            has_filters=columns.has_filters,
            has_top_p=bool((columns.on_host("top_p") < 1).any()),
            has_edits=columns.has_edits,
            has_history=history is not None and columns.has_penalty,
        )


class Selection(NamedTuple):
    """The selected rows as kernels read them."""

    vocab_size: int
    stages: Stages
    fields: Int[Tensor, "rows fields"]
    lists: ParameterLists
    seen: Seen | None  # of the stage with a history

    @classmethod
    def of(cls, columns: SamplingColumns, history: History | None) -> Self:
        """Return the rows as they are selected now."""
        stages = Stages.of(columns, history)
        seen = seen_of(history, stages)
        return cls(columns.vocab_size, stages, _fields_of(columns), ParameterLists.of(columns), seen)


def seen_of(history: History | None, stages: Stages) -> Seen | None:
    """Return the history's tensors; None if no row has a penalty."""
    if history is None or not stages.has_history:
        return None
    return Seen(history.tokens, history.last, history.counts, history.lengths)


def make_batch(
    logits: Tensor, selection: Selection, positions: Tensor, allowed: Tensor | None, lines: Lines | None
) -> Batch:
    """Return the kernels' arguments. Without `lines`, each row has one line."""
    fields, lists = selection.fields, selection.lists
    if lines is not None:
        fields = fields[lines.rows]
        fields[:, NUM_DRAFTS.value] = lines.entries
    seen = selection.seen or Seen(lists.masks, lists.masks, lists.masks, fields)
    return Batch(
        logits=logits,
        row_stride=logits.stride(0),
        vocab_size=selection.vocab_size,
        fields=fields,
        positions=positions,
        allowed=lists.masks if allowed is None else allowed,
        allowed_stride=0 if allowed is None else allowed.stride(0),
        masks=lists.masks,
        num_words=num_mask_words(selection.vocab_size),
        bias_ids=lists.bias_ids,
        biases=lists.biases,
        end_ids=lists.end_ids,
        last=seen.last,
        counts=seen.counts,
        lengths=seen.lengths,
        drafts=fields if lines is None else lines.drafts,
    )


_fields_by_columns: WeakKeyDictionary[SamplingColumns, tuple[object, Tensor]] = WeakKeyDictionary()


def _fields_of(columns: SamplingColumns) -> Int[Tensor, "rows fields"]:
    selection, fields = _fields_by_columns.get(columns, (None, None))
    if fields is None or selection is not columns.selection:
        fields = torch.from_numpy(make_fields(columns)).to(columns.device)
        _fields_by_columns[columns] = columns.selection, fields
    return fields


def make_fields(columns: SamplingColumns) -> npt.NDArray[np.int64]:
    """Return the lines of the rows on the host."""
    of, (bias_starts, end_starts) = columns.on_host, columns.starts_on_host
    column_by_field = {
        TEMPERATURE.value: _bits(of("temperature")),
        TEMPERATURE_LAST.value: of("temperature_last"),
        IS_FILTERED.value: of("is_filtered"),
        SEED.value: of("seed"),
        FIRST_FREE_POSITION.value: of("num_prompt_tokens") + of("min_new_tokens"),
        MASK_INDEX.value: of("mask_index"),
        HISTORY_SLOT.value: of("history_slot"),
        REPETITION_PENALTY.value: _bits(of("repetition_penalty")),
        REPETITION_WINDOW.value: of("repetition_window"),
        FREQUENCY_PENALTY.value: _bits(of("frequency_penalty")),
        PRESENCE_PENALTY.value: _bits(of("presence_penalty")),
        BIAS_START.value: bias_starts[:-1],
        BIAS_STOP.value: bias_starts[1:],
        END_START.value: end_starts[:-1],
        END_STOP.value: end_starts[1:],
        NUM_TOP.value: of("top_logprobs"),
        IS_PROCESSED.value: of("logprobs_processed"),
        **{field.value: of(name).view(np.int64) for name, field in FILTER_FIELDS.items()},
    }
    fields = np.zeros((len(columns), NUM_FIELDS.value), np.int64)
    for field, column in column_by_field.items():
        fields[:, field] = column
    return fields


def unused_line() -> npt.NDArray[np.int64]:
    """Return the line of padding: every stage passes over it."""
    line = np.zeros(NUM_FIELDS.value, np.int64)
    line[[MASK_INDEX.value, HISTORY_SLOT.value, NUM_TOP.value]] = -1
    for name, field in FILTER_FIELDS.items():
        line[field.value] = np.float64(FILTERS[name].off).view(np.int64)
    line[IS_UNUSED.value] = 1
    return line


def _bits(column: npt.NDArray[np.float32]) -> npt.NDArray[np.int32]:
    return np.ascontiguousarray(column).view(np.int32)


@triton.jit
def integer(batch, row, field: tl.constexpr):
    return tl.load(batch.fields + row * NUM_FIELDS + field)


@triton.jit
def single(batch, row, field: tl.constexpr):
    return integer(batch, row, field).to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def double(batch, row, field: tl.constexpr):
    return integer(batch, row, field).to(tl.float64, bitcast=True)
