"""Groups of layers that share page tables, and the number of pages that each row has in a group.

All sizes are known before any memory is allocated. Loads no torch.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import final

from infer.compute.kvcache.cache_settings import CacheSettings
from infer.compute.kvcache.pages import num_pages
from infer.compute.operands.limits import RECENT_PAGES, STATE_TOKENS
from infer.compute.operands.mixers import Attention, GatedDeltaNet, Mixer, Recurrent
from infer.compute.quantization.kv_formats import (
    BLOCK_POSITIONS,
    QUANTIZED,
    VALUES_PER_SCALE,
    check_kv_type,
    key_block_bytes,
    num_blocks,
    value_block_bytes,
)
from infer.errors import InvalidRequestError

_FLOAT_BYTES = 4
TEXT_PAGE_TOKENS = 64  # in pages of an encoder's texts
_Q8_GAIN = 1.1  # the quotient of a step's bytes from which q8 is recommended


def page_bytes(layer: Mixer, kv_type: str, page_tokens: int) -> int:
    """Return the bytes that a layer has in each page of `page_tokens` tokens."""
    if isinstance(layer, Attention):
        block = key_block_bytes(kv_type, layer.head_dim) + value_block_bytes(kv_type, layer.head_dim)
        return num_blocks(page_tokens) * layer.num_kv_heads * block
    if isinstance(layer, GatedDeltaNet):
        return _FLOAT_BYTES * sum(map(prod, layer.page_shapes(page_tokens)))
    return _FLOAT_BYTES * page_tokens * layer.num_channels


def slot_bytes(layer: Attention, kv_type: str) -> int:
    """Return the bytes of one token's keys and values in a layer."""
    return page_bytes(layer, kv_type, BLOCK_POSITIONS) // BLOCK_POSITIONS


def read_bytes(layer: Mixer, kv_type: str, context: int) -> int:
    """Return the bytes of a layer's cache that a decode step reads after `context` tokens, if no policy evicts.

    A gated delta net reads a state, and on average half a page of its log.
    """
    if isinstance(layer, Attention):
        visible = context if layer.most_seen is None else min(context, layer.most_seen)
        return visible * slot_bytes(layer, kv_type)
    if isinstance(layer, GatedDeltaNet):
        _, state, keys, updates, _ = map(prod, layer.page_shapes(STATE_TOKENS))
        return _FLOAT_BYTES * (state + (keys + updates) // 2)
    return _FLOAT_BYTES * layer.num_channels * (layer.num_taps - 1)


def q8_pays_from(layers: Sequence[Mixer], kv_type: str, most: int, bytes_of: Callable[[str, int], int]) -> int | None:
    """Return the context, a power of 2, from which a decode step reads a tenth less if keys and values are in q8.

    `bytes_of` returns the bytes that a step reads with a kv type and a context. None: q8 cannot store the heads, the
    type is quantised already, or no context up to `most` is long enough.
    """
    dims = [layer.head_dim for layer in layers if isinstance(layer, Attention)]
    if kv_type in QUANTIZED or any(dim % VALUES_PER_SCALE for dim in dims):
        return None
    contexts = (1 << power for power in range(9, most.bit_length()))
    return next((each for each in contexts if bytes_of(kv_type, each) >= _Q8_GAIN * bytes_of("q8", each)), None)


def num_text_pages(num_texts: int, num_tokens: int) -> int:
    """Return the number of pages for texts with `num_tokens` tokens in total."""
    return num_pages(num_tokens, TEXT_PAGE_TOKENS) + num_texts


def text_cache_bytes(attention: Attention, num_texts: int, num_tokens: int, kv_type: str) -> int:
    """Return the bytes of keys and values of an encoder's texts, which are stored for two layers at a time."""
    sizes = key_block_bytes(kv_type, attention.head_dim) + value_block_bytes(kv_type, attention.head_dim)
    blocks = num_text_pages(num_texts, num_tokens) * TEXT_PAGE_TOKENS // BLOCK_POSITIONS
    return 2 * attention.num_kv_heads * blocks * sizes


ROW_STATES = RECENT_PAGES + 2  # most pages of recurrent layers that a row holds
_STATES_PER_ROW, _SHARED_STATES = 2, 8  # pages of recurrent layers


@final
@dataclass(frozen=True)
class PageGroup:
    """Layers whose tokens attend to the same slots: the first `sinks`, the `window` − 1 before them, and themselves.

    With `chunk`, a token attends to the slots of its own chunk instead of a window.

    A recurrent layer keeps its results only in the page of a step's first token, and in its last `RECENT_PAGES` pages.
    With `has_states`, a page begins with a state, and a token reads its page from there.
    """

    layers: tuple[int, ...]
    sinks: int
    window: int | None  # None: all
    num_fixed: int  # pages that contain the sinks
    pages_per_row: int
    is_late: bool  # True if they apply only after some time; until then all slots are visible
    last_position: int | None = None  # later tokens read the sinks as if from this position; None: rows never reach it
    is_recurrent: bool = False
    has_states: bool = False
    chunk: int | None = None
    pool_limit: int | None = None  # pages that fit in the memory for states; None: as many as the rows need


def check_layers(settings: CacheSettings, layers: Sequence[Mixer]) -> None:
    """Raise InvalidRequestError if a network with these layers does not support the settings."""
    attention = [layer for layer in layers if isinstance(layer, Attention)]
    if settings.evicts and not all(layer.is_causal for layer in attention):
        raise InvalidRequestError(
            f"eviction_policy {settings.eviction_policy} needs a model that generates, but this is an encoder: use none"
        )
    if settings.kv_type != "auto":
        for head_dim in sorted({layer.head_dim for layer in attention}):
            check_kv_type(settings.kv_type, head_dim)
    if settings.page_tokens != STATE_TOKENS and any(isinstance(layer, GatedDeltaNet) for layer in layers):
        raise InvalidRequestError(
            f"page_tokens must be {STATE_TOKENS} for a model with states, whose bits depend on it, "
            f"got {settings.page_tokens}"
        )
    if settings.state_memory_mb is not None and len(attention) == len(layers):
        raise InvalidRequestError(
            f"state_memory_mb={settings.state_memory_mb} needs a model with states, and this one has none: leave it out"
        )
    if settings.evicts and all(layer.most_seen is not None for layer in attention):
        raise InvalidRequestError(
            f"eviction_policy {settings.eviction_policy} evicts tokens of layers that attend to all tokens, and every "
            "layer of this model has its own window or chunks: use none"
        )


def make_groups(
    layers: Sequence[Mixer], settings: CacheSettings, capacity: int, step_tokens: int, context: int | None = None
) -> tuple[PageGroup, ...]:
    """Return the groups of a cache for rows of `capacity` tokens that grow by at most `step_tokens` in one step.

    `context` is the number of tokens that the model was made for. If it is None or at least `capacity`, distances are
    not limited.
    """
    indices_by_reach: dict[tuple[int | None, int | None], list[int]] = {}
    recurrent = list[int]()
    for index, layer in enumerate(layers):
        if isinstance(layer, Attention):
            indices_by_reach.setdefault((layer.window, layer.chunk), []).append(index)
        else:
            recurrent.append(index)
    page_tokens = settings.page_tokens
    groups = []
    for (own, chunk), indices in indices_by_reach.items():
        is_evicting = own is None and chunk is None and settings.evicts
        sinks = settings.protected_prefix if is_evicting else 0
        window = settings.eviction_window - sinks if is_evicting else own
        num_fixed, share = num_pages(sinks, page_tokens), num_pages(capacity, page_tokens)
        # Two pages more than the window and a step fill, because neither begins at the start of a page.
        is_late = is_evicting and settings.is_late
        most_seen = window if chunk is None else chunk
        if most_seen is not None and not is_late:
            share = min(share, num_fixed + num_pages(most_seen + step_tokens, page_tokens) + 1)
        last_position = context - 1 if is_evicting and context is not None and capacity > context else None
        groups.append(PageGroup(tuple(indices), sinks, window, num_fixed, share, is_late, last_position, chunk=chunk))
    if recurrent:
        groups.append(_recurrent_group(layers, recurrent, settings, num_pages(capacity, page_tokens)))
    return tuple(groups)


def with_state_memory(
    settings: CacheSettings, layers: Sequence[Mixer], capacity: int, num_rows: int, spare_bytes: int | None
) -> CacheSettings:
    """Return the settings with a memory for states, if the layers have states and the settings have no memory for them.

    The memory holds the states of one row, and as many more as the rows use in at most `spare_bytes` bytes. If
    `spare_bytes` is None, the memory is unknown and nothing is limited.
    """
    own = _recurrent(layers)
    if not own or settings.state_memory_mb is not None:
        return settings
    size, least = _states_bytes(own, settings), _least_states(num_pages(capacity, settings.page_tokens))
    more = (max(least, _most_states(num_rows, least)) - least) * size
    num_bytes = least * size + (more if spare_bytes is None else min(more, max(0, spare_bytes)))
    return replace(settings, state_memory_mb=-(-num_bytes >> 20))


def _recurrent(layers: Sequence[Mixer]) -> list[Recurrent]:
    return [layer for layer in layers if not isinstance(layer, Attention)]


def _states_bytes(layers: Sequence[Recurrent], settings: CacheSettings) -> int:
    return sum(page_bytes(layer, "f32", settings.page_tokens) for layer in layers)


def _least_states(full: int) -> int:
    """Return the pages of a row that would have `full` pages.

    They include the active page, and the one before it for undoing tokens.
    """
    return min(full, ROW_STATES)


def _most_states(num_rows: int, each: int) -> int:
    return min(num_rows * each, num_rows * _STATES_PER_ROW + _SHARED_STATES)


def _recurrent_group(layers: Sequence[Mixer], indices: Sequence[int], settings: CacheSettings, full: int) -> PageGroup:
    """Return the group of the recurrent layers. A full row would have `full` pages.

    Raises InvalidRequestError if the memory for states is too small for one row.
    """
    own, most, megabytes = _recurrent(layers), None, settings.state_memory_mb
    least = _least_states(full)
    if megabytes is not None:
        num_bytes = _states_bytes(own, settings)
        most = (megabytes << 20) // num_bytes
        if most < least:
            needed = -(-least * num_bytes >> 20)
            raise InvalidRequestError(
                f"state_memory_mb must be at least {needed}, the states of one sequence, got {megabytes}"
            )
    return PageGroup(
        tuple(indices),
        sinks=0,
        window=max(layer.num_taps for layer in own),
        num_fixed=0,
        pages_per_row=least,
        is_late=False,
        is_recurrent=True,
        has_states=any(isinstance(layer, GatedDeltaNet) for layer in own),
        pool_limit=most,
    )


def most_pages(groups: Sequence[PageGroup]) -> int:
    """Return the number of pages of a full row, in the group that needs the most."""
    return max(group.pages_per_row for group in groups)


def pool_sizes(groups: Sequence[PageGroup], num_rows: int, pool_pages: int | None, capacity: int) -> list[int]:
    """Return the number of pages in each group's pool: enough for all rows when full, at most `pool_pages` if given.

    Pages with states are large, and few rows write long texts at the same time, so all rows share the pages for them.
    The unused pages keep states from which other rows may continue.

    Raises InvalidRequestError if a row of `capacity` tokens would not fit.
    """
    full = [_full_pool(group, num_rows) for group in groups]
    if pool_pages is None:
        return full
    if pool_pages < (least := most_pages(groups)):
        raise InvalidRequestError(
            f"pool_pages must be at least {least}, the pages of one sequence of {capacity:,} tokens, got {pool_pages}: "
            "give the cache more pages, or set a smaller max_seq_len"
        )
    return [count if group.is_recurrent else min(count, pool_pages) for group, count in zip(groups, full, strict=True)]


def _full_pool(group: PageGroup, num_rows: int) -> int:
    if group.pool_limit is not None:
        return group.pool_limit
    return _most_states(num_rows, group.pages_per_row) if group.is_recurrent else num_rows * group.pages_per_row
