"""Batches to sample from, the result of the single-row reference for each row, and hypothesis strategies for both."""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor

from infer.compute import ops
from infer.compute.sampling import definition, sampler
from infer.compute.sampling.columns import SamplingColumns, uses_history
from infer.compute.sampling.definition import LogitsError
from infer.compute.sampling.history import History
from infer.compute.sampling.masks import pack_masks
from infer.sampling_params import SamplingParams

INF = math.inf

# The functions that sample the tokens of a batch: the definition row by row, and the CPU's.
IMPLEMENTATIONS: dict[str, sampler.Choose] = {"definition": sampler.choose_tokens, "ops": ops.choose_tokens}


@dataclass(frozen=True)
class Row:
    """One row of a batch. `values` are its parameters. Its context is prompt and output.

    `allowed` are the tokens that a grammar allows.
    """

    logits: Tensor
    values: Mapping[str, Any]
    context: tuple[int, ...] = ()
    num_prompt_tokens: int = 0
    allowed: frozenset[int] | None = None

    @cached_property
    def params(self) -> SamplingParams:
        return SamplingParams(**self.values)


def asking(row: Row, count: int | None, mode: str) -> Row:
    """Return a row that requests log-probabilities."""
    return replace(row, values={**row.values, "logprobs": count, "logprobs_mode": mode})


@dataclass(frozen=True)
class Batch:
    """Arguments of `sampler.sample`, in its order."""

    logits: Tensor
    columns: SamplingColumns
    history: History | None
    positions: Tensor
    allowed: Tensor | None

    def arguments(self) -> tuple[Tensor, SamplingColumns, History | None, Tensor, Tensor | None]:
        return self.logits, self.columns, self.history, self.positions, self.allowed


def make_batch(rows: Sequence[Row], end_ids: frozenset[int] = frozenset()) -> Batch:
    vocab_size, params = len(rows[0].logits), [row.params for row in rows]
    prompts = [row.num_prompt_tokens for row in rows]
    columns = SamplingColumns.of(params, vocab_size, num_prompt_tokens=prompts, end_ids=end_ids)
    history = None
    if any(map(uses_history, params)):
        history = History(len(rows), max(len(row.context) for row in rows) + 4, vocab_size)
        for slot, row in enumerate(rows):
            if uses_history(row.params):
                history.begin(slot, row.context, row.num_prompt_tokens)
    has_grammar = any(row.allowed is not None for row in rows)
    masks = pack_masks([range(vocab_size) if row.allowed is None else row.allowed for row in rows], vocab_size)
    positions, logits = torch.tensor([len(row.context) for row in rows]), torch.stack([row.logits for row in rows])
    return Batch(logits, columns, history, positions, masks if has_grammar else None)


def by_reference(function: Callable[..., Any], row: Row, end_ids: frozenset[int]) -> Any:
    options = {"num_prompt_tokens": row.num_prompt_tokens, "eos_token_ids": end_ids, "allowed": row.allowed}
    return function(row.logits, row.context, row.params, **options)


def reference_logits(row: Row, end_ids: frozenset[int] = frozenset()) -> Tensor | None:
    """Return the logits to which the reference adds noise, or None for a row that fails."""
    with suppress(LogitsError):
        logits: Tensor = by_reference(definition.process_logits, row, end_ids)
        return logits
    return None


def reference_token(row: Row, end_ids: frozenset[int] = frozenset()) -> int:
    """Return the reference's token, or the code that a batch gives for its error."""
    try:
        return int(by_reference(definition.sample_token, row, end_ids))
    except LogitsError as error:
        return error.code


def same_bits(a: Tensor, b: Tensor) -> bool:
    bytes_of_a, bytes_of_b = (x.contiguous().reshape(-1).view(torch.uint8) for x in (a, b))
    return (a.dtype, a.shape) == (b.dtype, b.shape) and torch.equal(bytes_of_a, bytes_of_b)


def kept_ids(logits: Tensor) -> list[int]:
    return (logits > -INF).nonzero()[:, 0].tolist()


# Histories


def tables(history: History, slot: int) -> tuple[Any, ...]:
    """Return the tables of a slot that a kernel reads: tokens, number of the prompt's, last positions and counts."""
    tokens = history.tokens[slot, : int(history.lengths[slot])]
    read = history.num_prompt_tokens[slot], history.last[slot] - 1, history.counts[slot]
    return tokens.tolist(), *(each.tolist() for each in read)


def tables_of(token_ids: list[int], num_prompt_tokens: int, vocab_size: int) -> tuple[Any, ...]:
    """Return the same tables, computed from the list itself."""
    positions, count = {token_id: at for at, token_id in enumerate(token_ids)}, Counter(token_ids[num_prompt_tokens:])
    vocabulary = range(vocab_size)
    return token_ids, num_prompt_tokens, [positions.get(x, -1) for x in vocabulary], [count[x] for x in vocabulary]


# Logits

VOCAB_SIZES = (1, 2, 3, 5, 8, 31, 32, 33, 64, 100, 257, 1000, 5000)
STYLES = ("normal", "wide", "ties", "constant", "extreme", "banned", "denormal", "peaked", "equal zeros")


CHOICES = {  # of the styles that draw from a few numbers
    "extreme": [3e38, -3e38, 3.4028234e38, -3.4028234e38, 1e38, 0.0, -0.0, 1.0, -INF],
    "denormal": [1e-40, -1e-40, 1e-45, 0.0, -0.0],
    "equal zeros": [0.0, -0.0],
}


def make_logits(style: str, vocab_size: int, seed: int) -> Tensor:
    """Return a row with at least one finite logit."""
    draw = np.random.default_rng(seed)
    x = draw.normal(size=vocab_size) * 3
    match style:
        case "wide":
            x = x * 10
        case "ties":
            x = np.round(x)
        case "constant":
            x = np.full(vocab_size, draw.normal())
        case "banned":
            x = np.where(draw.random(vocab_size) < 0.9, -INF, x)
        case "peaked":
            x[draw.integers(vocab_size)] += 40
        case name if name in CHOICES:
            x = draw.choice(CHOICES[name], size=vocab_size)
    row = torch.from_numpy(x.astype(np.float32))
    if not bool((row > -INF).any()):
        row[draw.integers(vocab_size)] = 1.0
    return row


def ids(vocab_size: int) -> st.SearchStrategy[int]:
    return st.integers(0, vocab_size - 1)


def contexts(vocab_size: int) -> st.SearchStrategy[tuple[int, ...]]:
    """Draw contexts, in which repeats are likely, and long repeats possible."""
    few = st.integers(0, min(vocab_size, 6) - 1)
    return st.one_of(st.lists(few, max_size=30), st.lists(ids(vocab_size), max_size=12)).map(tuple)


@st.composite
def sampling_values(draw: st.DrawFn, vocab_size: int) -> dict[str, Any]:
    """Draw all parameters. Each has its default value in about half of the cases.

    Strategies must not call checked functions, because beartype draws random numbers of its own.
    """
    knobs: dict[str, st.SearchStrategy[Any]] = {
        "temperature": st.sampled_from([0.0, 0.7, 1.0, 2.0, 1e-3, 1e-30, 1e-320]) | st.floats(0, 2),
        "top_k": st.sampled_from([1, 2, 3, 50, vocab_size, vocab_size + 1, 10**30]) | st.integers(1, vocab_size),
        "top_p": st.sampled_from([0.1, 0.5, 0.8, 0.9, 0.999999, 1e-12, 1.0]) | st.floats(1e-9, 1),
        "min_p": st.sampled_from([0.05, 0.5, 0.999, 1e-30, 5e-324]) | st.floats(0, 1, exclude_max=True),
        "repetition_penalty": st.sampled_from([1.1, 2.0, 0.5, 1e300, 1e-300]),
        "repetition_window": st.sampled_from([0, 1, 2, 5, 10**6, 2**80]),
        "frequency_penalty": st.sampled_from([0.5, -2.0, 2.0, 1e-40]),
        "presence_penalty": st.sampled_from([0.5, -2.0, 2.0]),
        "logit_bias": st.dictionaries(
            ids(vocab_size), st.sampled_from([5.0, -5.0, 0.0, 1e300, -1e300, 100.0, -INF, INF]), max_size=4
        ),
        "allowed_token_ids": st.lists(ids(vocab_size), min_size=1, max_size=40),
        "min_new_tokens": st.sampled_from([1, 3, 30, 128]),
        "stop_token_ids": st.lists(ids(vocab_size), max_size=3),
        "temperature_last": st.booleans(),
    }
    chosen = {name: draw(values) for name, values in knobs.items() if draw(st.booleans())}
    return {"seed": draw(st.integers(0, 2**64 - 1))} | chosen


@st.composite
def row_of(draw: st.DrawFn, vocab_size: int, has_grammar: bool) -> Row:
    context = draw(contexts(vocab_size))
    logits = make_logits(draw(st.sampled_from(STYLES)), vocab_size, draw(st.integers(0, 2**32 - 1)))
    if vocab_size <= 8 and draw(st.booleans()):
        values = st.sampled_from([0.0, -0.0, 1.0, -1.0, 2.0, -INF, 3e38, -3e38]) | st.floats(-9, 9, width=32)
        logits = torch.tensor(draw(st.lists(values, min_size=vocab_size, max_size=vocab_size)), dtype=torch.float32)
    allowed = draw(st.none() | st.frozensets(ids(vocab_size), max_size=50)) if has_grammar else None
    return Row(logits, draw(sampling_values(vocab_size)), context, draw(st.integers(0, len(context))), allowed)


@st.composite
def batches_of_rows(
    draw: st.DrawFn, max_rows: int = 6, vocab_sizes: Sequence[int] = VOCAB_SIZES
) -> tuple[list[Row], frozenset[int]]:
    """Draw rows of one vocabulary and one float type, and the model's EOS ids."""
    vocab_size = draw(st.sampled_from(vocab_sizes))
    has_grammar = draw(st.booleans())
    rows = draw(st.lists(row_of(vocab_size, has_grammar), min_size=1, max_size=max_rows))
    dtype = draw(st.sampled_from([torch.float32, torch.float32, torch.float16, torch.bfloat16]))
    # A logit that a narrow type would round to infinity is replaced by the type's largest number.
    limit = torch.finfo(dtype).max
    rows = [
        replace(row, logits=row.logits.clamp(-limit, limit).where(row.logits > -INF, -INF).to(dtype)) for row in rows
    ]
    return rows, draw(st.frozensets(ids(vocab_size), max_size=3))
