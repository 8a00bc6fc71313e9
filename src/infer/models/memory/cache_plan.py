"""The cache that a model gets in the available memory, and the option that helps if it does not fit. Loads no torch."""

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from infer.compute.kvcache.cache_settings import CacheSettings
from infer.compute.kvcache.groups import make_groups, most_pages, with_state_memory
from infer.compute.kvcache.pages import num_pages
from infer.compute.operands.architecture import Architecture
from infer.compute.operands.mixers import Mixer
from infer.errors import InvalidRequestError, ModelError
from infer.models.memory.memory_estimate import LoadSettings, StoredMatrix, cache_bytes, estimate
from infer.request_limits import MAX_FULL_CONTEXTS

STATES_SHARE = 8  # states of more than one row take an eighth of the memory that one full row leaves
_FULL_MOST = 10**6  # megabytes


class CachePlan(NamedTuple):
    """Settings, with the memory for states if the model has states, and the number of pages."""

    settings: CacheSettings
    pool_pages: int


class _Size(NamedTuple):
    """The sizes of a cache that an option changes."""

    num_tokens: int
    pool_pages: int | None
    settings: CacheSettings


def plan_cache(
    layers: Sequence[Mixer],
    settings: CacheSettings,
    *,
    num_tokens: int,
    num_rows: int,
    pool_pages: int | None,
    available: int | None,
    needed: Callable[[CacheSettings, int], int],
) -> CachePlan:
    """Return the cache of `num_rows` rows of up to `num_tokens` tokens in the available memory.

    Without `pool_pages` it has pages for 1 to 8 full rows: as many as fit. `needed` returns the bytes of a cache.
    """
    each = num_pages(num_tokens, settings.page_tokens)
    counts = [pool_pages] if pool_pages else [each * count for count in range(MAX_FULL_CONTEXTS, 0, -1)]
    if available is None:
        return CachePlan(with_state_memory(settings, layers, num_tokens, num_rows, None), counts[0])
    least = with_state_memory(settings, layers, num_tokens, num_rows, 0)
    spare = (available - needed(least, counts[-1])) // STATES_SHARE
    chosen = with_state_memory(settings, layers, num_tokens, num_rows, spare)
    return CachePlan(chosen, next((count for count in counts if needed(chosen, count) <= available), counts[-1]))


def check_fits(
    name: str,
    architecture: Architecture,
    tensors: Mapping[str, StoredMatrix],
    load: LoadSettings,
    cache: CacheSettings,
    *,
    num_tokens: int,
    pool_pages: int | None = None,
    available: int | None,
) -> None:
    """Raise ModelError, with the option that helps, if the smallest cache and the model need more than is available.

    If `available` is None, the available memory is unknown and nothing is refused.
    """
    needed = estimate(architecture, tensors, load, cache, num_tokens=num_tokens, pool_pages=pool_pages)
    if available is None or needed.model <= available:
        return
    instead = option_that_fits(
        architecture, tensors, load, cache, num_tokens=num_tokens, pool_pages=pool_pages, available=available
    )
    instead = instead or "use a smaller quantisation of it (or weights='q4')"
    raise ModelError(
        f"{name} needs {_megabytes(needed.model)} MB here ({_megabytes(needed.weights)} of weights, "
        f"{_megabytes(needed.cache)} of cache for {num_tokens:,} tokens, {_megabytes(needed.workspace)} of workspace), "
        f"but {_megabytes(available)} MB are available: {instead}"
    )


def option_that_fits(
    architecture: Architecture,
    tensors: Mapping[str, StoredMatrix],
    load: LoadSettings,
    cache: CacheSettings,
    *,
    num_tokens: int,
    pool_pages: int | None,
    available: int,
) -> str | None:
    """Return an option with which a model that is too large can be loaded, as a sentence, or None if none helps."""

    def needed(size: _Size) -> int:
        model = architecture, tensors, load, size.settings
        return estimate(*model, num_tokens=size.num_tokens, pool_pages=size.pool_pages).model

    size, step = _Size(num_tokens, pool_pages, cache), load.step
    return _option_that_fits(architecture.cached_mixers, size, step.logits, step.tokens, available, needed)


def rows_bytes(
    layers: Sequence[Mixer],
    vocab_size: int,
    cache: CacheSettings,
    kv_type: str,
    *,
    num_tokens: int,
    num_rows: int,
    pool_pages: int | None = None,
    step_tokens: int,
) -> int:
    """Return the bytes that are allocated after loading.

    They are the cache, and the history and logits of as many full rows as fit in it.
    """
    full = num_rows
    if pool_pages is not None:
        full = min(full, num_pages(pool_pages, num_pages(num_tokens, cache.page_tokens)))
    sizes = num_tokens, num_rows, pool_pages, step_tokens
    return cache_bytes(layers, cache, kv_type, *sizes) + full * (12 * vocab_size + 8 * num_tokens)


def check_rows_fit(
    layers: Sequence[Mixer],
    vocab_size: int,
    cache: CacheSettings,
    kv_type: str,
    *,
    num_tokens: int,
    num_rows: int,
    pool_pages: int | None = None,
    step_tokens: int,
    available: int | None,
) -> None:
    """Raise InvalidRequestError, with an option that helps, if `rows_bytes` are more than is available."""

    def needed(size: _Size, rows: int = num_rows) -> int:
        return rows_bytes(
            layers, vocab_size, size.settings, kv_type,
            num_tokens=size.num_tokens, num_rows=rows, pool_pages=size.pool_pages, step_tokens=step_tokens,
        )  # fmt: skip

    size = _Size(num_tokens, pool_pages, cache)
    if available is None or (total := needed(size)) <= available:
        return
    what = f"{num_rows} x {num_tokens:,} tokens of cache"
    what += "" if pool_pages is None else f" in {pool_pages:,} pages"
    rows = available // needed(size, 1) if pool_pages is None else 0
    instead = f"{rows} rows fit" if rows else None
    if instead is None:
        one = needed if pool_pages else lambda size: needed(size, 1)
        instead = _option_that_fits(layers, size, num_rows, step_tokens, available, one) or "free some of it"
    raise InvalidRequestError(
        f"{what} need {_megabytes(total)} MB, but {_megabytes(available)} MB are available: {instead}"
    )


def _option_that_fits(
    layers: Sequence[Mixer],
    size: _Size,
    num_rows: int,
    step_tokens: int,
    available: int,
    needed: Callable[[_Size], int],
) -> str | None:
    """Return the option with which a cache of the available memory can be made, or None if no option helps."""
    plain = replace(size.settings, state_memory_mb=None)
    least = with_state_memory(plain, layers, size.num_tokens, num_rows, 0)
    if least.state_memory_mb is not None and needed(size._replace(settings=least)) <= available:
        megabytes = bisect_right(
            range(least.state_memory_mb + 1, _FULL_MOST),
            available,
            key=lambda count: needed(size._replace(settings=replace(least, state_memory_mb=count))),
        )
        return f"state_memory_mb={least.state_memory_mb + megabytes} fits"
    if size.pool_pages is not None:
        first = most_pages(make_groups(layers, size.settings, size.num_tokens, step_tokens))
        fitting = bisect_right(
            range(first, size.pool_pages), available, key=lambda count: needed(size._replace(pool_pages=count))
        )
        if fitting:
            return f"pool_pages={first + fitting - 1} fits"

    def of(count: int) -> int:
        settings = with_state_memory(plain, layers, count, num_rows, 0)
        pages = None if size.pool_pages is None else num_pages(count, settings.page_tokens)
        return needed(_Size(count, pages, settings))

    tokens = bisect_right(range(1, size.num_tokens), available, key=of)
    given = {"pool_pages": size.pool_pages, "state_memory_mb": size.settings.state_memory_mb}
    without = " and ".join(name for name, value in given.items() if value is not None)
    return f"max_seq_len={tokens} fits" + (f" without {without}" if without else "") if tokens > 1 else None


def _megabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:,.0f}"
