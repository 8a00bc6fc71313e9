"""The sampler as commands, for a single batch or after the head of a recorded step, and their arguments.

The arguments are addresses of the columns, of the history, and of scratch. A row's vocabulary is cut into at most 1,024
groups of a whole number of vectors. The groups are divided among the threads.
"""

import ctypes
from typing import final

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from infer.compute.backends.cpu.compile.addresses import compiled_address
from infer.compute.backends.cpu.layouts import LANES
from infer.compute.backends.cpu.recording import scope
from infer.compute.backends.cpu.sample_records import (
    SAMPLE,
    SAMPLE_COLUMNS,
    SAMPLE_HISTORY,
    SAMPLE_LISTS,
    SAMPLE_SCRATCH,
)
from infer.compute.backends.cpu.thread_records import MAX_THREADS, Words, fields_of, integers
from infer.compute.backends.cpu.threads.dispatch_table import BARRIER, Command
from infer.compute.backends.cpu.threads.pool import aligned
from infer.compute.sampling.columns import SamplingColumns
from infer.compute.sampling.history import History
from infer.compute.sampling.masks import num_mask_words
from infer.errors import InvalidRequestError

MAX_GROUPS = 1024


@final
class SampleArguments:
    """The record of arguments of the sampler's commands (`SAMPLE`), for logits that stay where they are.

    Another selection of rows changes some words of the record. `positions` is an address. `starts`, `alive` and
    `sampled` have an entry per row, by default for one line of logits each.
    """

    def __init__(self, logits: Tensor, positions: int, position_offset: int) -> None:
        self._logits = logits
        self.record = np.zeros(1, SAMPLE)
        self.fields = fields_of(self.record)
        self.room = 0  # rows that there is memory for
        self._arrays: dict[str, Words] = {}
        self.starts, self.alive, self.sampled = (integers(0) for _ in range(3))
        self._scratch = {name: np.zeros(0, type_) for name, type_ in SAMPLE_SCRATCH.items()}
        self._columns: SamplingColumns | None = None
        self._history: History | None = None
        self._selection: object = None
        self.set(logits=logits.data_ptr(), row_stride=logits.stride(0))
        self.set(positions=positions, position_offset=position_offset)

    def set(self, **values: int) -> None:
        for name, value in values.items():
            setattr(self.fields, name, value)

    def arrays(self, **sizes: int) -> list[Words]:
        """Return arrays of at least these sizes, to which the fields of these names point.

        An array stays in place until a larger one is requested.
        """
        for name, size in sizes.items():
            if name not in self._arrays or size > len(self._arrays[name]):
                self._arrays[name] = integers(size)
            self.set(**{name: ctypes.addressof(self._arrays[name])})
        return [self._arrays[name] for name in sizes]

    def bind(self, columns: SamplingColumns, history: History | None) -> None:
        """Point to the selected columns and the history. Costs nothing if they are unchanged.

        Raises InvalidRequestError if a row has a penalty and the history does not fit.
        """
        if columns.selection is self._selection and history is self._history:
            return
        if (history is None or history.vocab_size != columns.vocab_size) and columns.has_penalty:
            raise InvalidRequestError(f"rows with a penalty need a history of {columns.vocab_size} words")
        is_new, num_ends = columns is not self._columns, len(columns.end_ids)
        has_room = len(columns) <= self.room and num_ends <= len(self._scratch["ends"])
        self._selection = None  # until all is in its place
        if is_new:
            self._columns = None
            self._cut(columns.vocab_size)
            self.set(**{name: columns.whole[name].data_ptr() for name in SAMPLE_COLUMNS})
        if history is not None and history is not self._history:
            self.set(capacity=history.capacity, prompt_lengths=history.num_prompt_tokens.data_ptr())
            self.set(**{name: getattr(history, name).data_ptr() for name in SAMPLE_HISTORY})
        self.set(num_rows=len(columns), masks=columns.masks.data_ptr(), logprobs=0)
        self.set(**{name: getattr(columns, name).data_ptr() for name in SAMPLE_LISTS})
        if is_new or not has_room:
            self._make_room(len(columns), num_ends)
        self._columns, self._history, self._selection = columns, history, columns.selection

    def _cut(self, vocab_size: int) -> None:
        num_vectors = -(-vocab_size // LANES)
        group_vectors = -(-num_vectors // MAX_GROUPS)
        self._num_groups = -(-num_vectors // group_vectors)
        self._padded = self._num_groups * group_vectors * LANES
        self.set(vocab=vocab_size, mask_words=num_mask_words(vocab_size))
        self.set(num_groups=self._num_groups, group_vectors=group_vectors, padded=self._padded)

    def _make_room(self, num_rows: int, num_ends: int) -> None:
        """Make room for `num_rows` rows or more: the room is a power of two, so that few joins need more."""
        room = self.room if num_rows <= self.room else 1 << (num_rows - 1).bit_length()
        self.room = 0  # until all is in its place
        self.starts, self.alive, self.sampled = self.arrays(starts=room, alive=room, sampled=room)
        self.starts[:], self.alive[:] = [*range(len(self.starts))], [1] * len(self.alive)
        sizes = {
            "maxima": room * self._num_groups,
            "ends": num_ends,
            **dict.fromkeys(("values", "ids", "weights", "scored"), room * self._padded),
        }
        for name, type_ in SAMPLE_SCRATCH.items():
            size = sizes.get(name, room * MAX_THREADS)
            if size > len(self._scratch[name]):
                self._scratch[name] = aligned(size, np.dtype(type_))
            self.set(**{name: self._scratch[name].ctypes.data})
        self.room = room


def choose_tokens(
    logits: Float[Tensor, "rows vocab"],
    columns: SamplingColumns,
    history: History | None,
    positions: Int[Tensor, "rows"],
    allowed: Int[Tensor, "rows words"] | None = None,
) -> Int[Tensor, "rows"]:
    """Return the token of each row, or a negative code. Logits to be edited are copied first: the caller's stay
    unchanged.
    """
    x = logits.float()
    if x.stride(-1) != 1 or ((columns.has_edits or allowed is not None) and x.data_ptr() == logits.data_ptr()):
        x = x.clone(memory_format=torch.contiguous_format)
    positions = positions.contiguous()
    allowed = None if allowed is None else allowed.contiguous()
    arguments = SampleArguments(x, positions.data_ptr(), position_offset=0)
    arguments.bind(columns, history)
    arguments.set(allowed=0 if allowed is None else allowed.data_ptr())
    with scope("sample", len(columns), logit_indices=positions) as run:
        run.commands += choice_commands(arguments, keeps=(positions, allowed))
    return torch.tensor(arguments.sampled[: len(columns)], dtype=torch.int64)


def choice_commands(arguments: SampleArguments, keeps: object = None) -> list[Command]:
    """Return scan, narrow and choose: `sampled` then holds a token or a negative code for each of the step's logits."""
    scan, narrow = ".sampling.stage_1_edit:scan", ".sampling.stage_2_candidates:narrow"
    makers = scan, narrow, ".sampling.stage_3_filter_and_draw:choose"
    return [command(maker, arguments, keeps) for maker in makers]


def logprob_commands(arguments: SampleArguments) -> list[Command]:
    """Return score and merge: `logprobs` then holds the log-probabilities that rows requested of the sampled tokens."""
    return [command(f".sampling.stage_4_logprobs:{name}", arguments) for name in ("score", "merge")]


def command(maker: str, arguments: SampleArguments, keeps: object = None) -> Command:
    label = f"sample.{maker.partition(':')[2]}"
    return Command(compiled_address(maker, SAMPLE), arguments.record, BARRIER, label, (arguments, keeps))
