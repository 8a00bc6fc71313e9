"""`ops.choose_tokens` as two launches for a batch without filters and four with: the tokens of `sampling.sampler`.

Log-probabilities are two more. Nothing is read back and no shape depends on a value. So after one call with the same
selection, it can be captured in a graph.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from infer.compute.backends.cuda.sampling.filters import choose_filtered, weigh_blocks
from infer.compute.backends.cuda.sampling.kernel_arguments import Batch, Lines, Selection, make_batch
from infer.compute.backends.cuda.sampling.logprobs import BlockParts, Found, Records, join_scores, weigh_scores
from infer.compute.backends.cuda.sampling.unfiltered import choose_plain, score_blocks
from infer.compute.sampling.columns import SamplingColumns
from infer.compute.sampling.history import History
from infer.compute.sampling.sampler import check_shapes

# The bits of the noise and the weights are those of separate, rounded operations.
EXACT = {"enable_fp_fusion": False}
_MAX_CHUNKS = 16_384  # that one program searches in registers


@dataclass(frozen=True)
class Tiling:
    """Powers of two: tokens per program, tokens per chunk, tokens that a filter's program holds in registers."""

    block: int = 4096
    chunk: int = 16
    capacity: int = 4096
    num_warps: int = 8
    filter_warps: int = 16


def tiling_of(vocab_size: int) -> Tiling:
    chunk = Tiling.chunk
    while triton.cdiv(vocab_size, chunk) > _MAX_CHUNKS:
        chunk *= 2
    return Tiling(chunk=chunk)


def choose_tokens(
    logits: Tensor, columns: SamplingColumns, history: History | None, positions: Tensor, allowed: Tensor | None = None
) -> Tensor:
    """Return the token of each row. Raises InvalidRequestError for wrong shapes: a kernel would read past them."""
    check_shapes(logits, columns, history, positions, allowed)
    return choose_by(tiling_of(columns.vocab_size), logits, columns, history, positions, allowed)


def choose_by(
    tiling: Tiling,
    logits: Tensor,
    columns: SamplingColumns,
    history: History | None,
    positions: Tensor,
    allowed: Tensor | None = None,
    lines: Lines | None = None,
    records: Records | None = None,
) -> Tensor:
    """Return the tokens of the rows as they are selected now."""
    return choose_selected(tiling, logits, Selection.of(columns, history), positions, allowed, lines, records)


def choose_selected(
    tiling: Tiling,
    logits: Tensor,
    selection: Selection,
    positions: Tensor,
    allowed: Tensor | None = None,
    lines: Lines | None = None,
    records: Records | None = None,
) -> Tensor:
    """Return the tokens, which are the same for any tiling. Those of unused lines may be anything.

    With `lines`, rows may have several. Each line is sampled as if the drafts before it were right. Values that
    log-probabilities need are stored in `records`.
    """
    num_lines = len(logits)
    token_ids = torch.empty(num_lines, dtype=torch.int64, device=logits.device)
    if not num_lines:
        return token_ids
    if logits.dtype == torch.float64 or logits.stride(1) != 1:
        logits = logits.float().contiguous()
    positions = positions.contiguous()
    allowed = None if allowed is None else allowed.contiguous()
    num_blocks, num_chunks = (triton.cdiv(selection.vocab_size, size) for size in (tiling.block, tiling.chunk))
    has_filters, has_top_p, has_edits, _ = selection.stages
    edits = {"EDITS": 2 if allowed is not None else int(has_edits)}
    blocks = {"BLOCK": tiling.block, "BLOCKS": triton.next_power_of_2(num_blocks)}
    batch = make_batch(logits, selection, positions, allowed, lines)

    def scratch(*shape: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(num_lines, *shape, dtype=dtype, device=logits.device)

    scores, largests = (scratch(num_blocks, dtype=torch.float32) for _ in range(2))
    raw_largests = scores if records is None else torch.empty_like(scores)
    score_ids, ends = scratch(num_blocks, dtype=torch.int32), scratch(2, dtype=torch.int32)
    maxima = scratch(num_chunks if has_filters else 1, dtype=torch.int32)
    score_blocks[num_blocks, num_lines](
        batch, scores, score_ids, largests, raw_largests, maxima,
        BLOCK=tiling.block, CHUNK=tiling.chunk, **edits, FILTERS=has_filters, LOGPROBS=records is not None,
        num_warps=tiling.num_warps, **EXACT,
    )  # fmt: skip
    choose_plain[(num_lines,)](
        batch, scores, score_ids, largests, token_ids, num_blocks, **blocks, **edits, num_warps=4, **EXACT
    )
    found = Found(token_ids, largests, raw_largests, ends)
    if has_filters:
        logprobs = {"LOGPROBS": records is not None}
        _choose_filtered(tiling, batch, found, maxima, num_blocks, blocks | edits, logprobs, has_top_p)
    if records is not None:
        _record_logprobs(batch, found, records, num_lines, num_blocks, blocks | edits | {"FILTERS": has_filters})
    return token_ids


def _choose_filtered(
    tiling: Tiling,
    batch: Batch,
    found: Found,
    maxima: Tensor,
    num_blocks: int,
    constants: dict[str, Any],
    logprobs: dict[str, bool],
    has_top_p: bool,
) -> None:
    """Choose the tokens of the lines with filters. `maxima` are the largest logits of all chunks."""
    num_lines, num_chunks = maxima.shape
    sums = torch.empty(num_lines, num_blocks, dtype=torch.int64, device=maxima.device)
    if has_top_p:
        weigh_blocks[num_blocks, num_lines](
            batch, found.largests, sums, num_blocks, **constants, num_warps=tiling.num_warps, **EXACT
        )
    gathered = torch.empty(num_lines, tiling.capacity // tiling.chunk, dtype=torch.int32, device=maxima.device)
    choose_filtered[(num_lines,)](
        batch, found.largests, sums, maxima, gathered, found.token_ids, found.ends, num_blocks, **constants,
        CHUNK=tiling.chunk, CHUNKS=triton.next_power_of_2(num_chunks), CAPACITY=tiling.capacity, **logprobs,
        num_warps=tiling.filter_warps, **EXACT,
    )  # fmt: skip


def _record_logprobs(
    batch: Batch, found: Found, records: Records, num_lines: int, num_blocks: int, constants: dict[str, Any]
) -> None:
    shape, device = (num_lines, num_blocks), found.largests.device
    totals = torch.empty(shape, dtype=torch.int64, device=device)
    ahead = torch.empty(shape, dtype=torch.int32, device=device)
    keys, ids = (torch.empty(*shape, records.most, dtype=torch.int32, device=device) for _ in range(2))
    parts, constants = BlockParts(totals, ahead, keys, ids), constants | {"MOST": records.most}
    weigh_scores[num_blocks, num_lines](batch, found, parts, num_blocks, **constants, num_warps=8, **EXACT)
    join_scores[(num_lines,)](
        batch, found, parts, records.words, records.done, num_blocks, **constants, num_warps=4, **EXACT
    )
