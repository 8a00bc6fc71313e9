"""Pages of layers with a state as kernels see them, and the causal convolution of each channel.

A step's tokens of a row are consecutive. A token's earlier inputs are read from the step if they belong to it, and from
the row's pages otherwise. In a long step, pages that are three apart may share memory. So each place is written by the
last token that has it: `is_kept`. The page in which a row's tokens of the step begin has its own memory if it has
earlier tokens, and so has the page before it.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from infer.compute.operands.limits import RECENT_PAGES
from infer.compute.operands.recurrent_cache import ConvCache, DeltaNetCache

RECENT = tl.constexpr(RECENT_PAGES)


class ConvPages(NamedTuple):
    """A layer's inputs of the convolution by page, and the pages of each row."""

    inputs: Any
    size: Any  # floats from a page to the next
    table: Any
    table_row: Any
    TOKENS: Any  # of a page, a constant


class DeltaNetPages(NamedTuple):
    """A gated delta net's part of each page. `DeltaNetCache` describes the tensors."""

    inputs: Any
    size: Any
    table: Any
    table_row: Any
    TOKENS: Any
    states: Any
    keys: Any
    updates: Any
    decays: Any


def conv_pages(layer: ConvCache | DeltaNetCache) -> ConvPages:
    pages = layer.pages
    page_tokens = tl.constexpr(pages.page_tokens)
    return ConvPages(layer.inputs, layer.inputs.stride(0), pages.table, pages.table.stride(0), page_tokens)


def delta_net_pages(layer: DeltaNetCache) -> DeltaNetPages:
    return DeltaNetPages(*conv_pages(layer), layer.states, layer.keys, layer.updates, layer.decays)


@triton.jit
def page_start(pages, row, index):
    """Return the number of floats before a row's page, from the start of a layer's first page."""
    return tl.load(pages.table + row * pages.table_row + index) * pages.size


@triton.jit
def is_kept(pages, rows, token, row, position, num_tokens):
    """Return True if the token writes its place of a page, and no later token of the step has the same memory."""
    first = token - position % pages.TOKENS
    is_older = (first < 0) | (tl.load(rows + tl.maximum(first, 0)) != row)
    later = token + RECENT * pages.TOKENS
    is_last = tl.load(rows + tl.minimum(later, num_tokens - 1)) != row
    return is_older | (later >= num_tokens) | is_last


@triton.jit
def convolved(
    projected, width, pages, taps, total, rows, token, row, position, first, i, end,
    CHANNELS: tl.constexpr, NUM_TAPS: tl.constexpr, IS_GATED: tl.constexpr,
):  # fmt: skip
    """Return total + the convolution of channels first + i for i < end, and the token's own inputs.

    A token's inputs are its first `CHANNELS` columns of `projected`. With IS_GATED, the third `CHANNELS` columns
    multiply them.
    """
    channels = first + i
    own = total
    for tap in tl.static_range(NUM_TAPS):
        back = NUM_TAPS - 1 - tap
        is_in_step = (token >= back) & (tl.load(rows + tl.maximum(token - back, 0)) == row)
        source, is_read = projected + (token - back) * width + channels, i < tl.where(is_in_step, end, 0)
        value = tl.load(source, mask=is_read, other=0.0)
        if IS_GATED:
            value *= tl.load(source + 2 * CHANNELS, mask=is_read, other=0.0)
        if back > 0:
            earlier = tl.maximum(position - back, 0)
            at = page_start(pages, row, earlier // pages.TOKENS) + earlier % pages.TOKENS * CHANNELS
            is_read = i < tl.where(is_in_step | (position < back), 0, end)
            value += tl.load(pages.inputs + at + channels, mask=is_read, other=0.0)
        total = tl.fma(tl.load(taps + tap * CHANNELS + channels, mask=i < end, other=0.0), value, total)
        own = value
    return total, own


@triton.jit
def store_input(pages, row, position, first, i, end, value, CHANNELS: tl.constexpr):
    at = page_start(pages, row, position // pages.TOKENS) + position % pages.TOKENS * CHANNELS
    tl.store(pages.inputs + at + first + i, value, mask=i < end)
