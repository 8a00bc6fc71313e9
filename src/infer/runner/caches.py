"""Make the cache of a model, or refuse it if it does not fit the available memory."""

from contextlib import suppress

from infer import ops
from infer.errors import InvalidRequestError
from infer.kvcache.cache_settings import CacheSettings
from infer.kvcache.paged import PagedCache
from infer.kvcache.pages import num_pages
from infer.model.memory_estimate import check_rows_fit
from infer.model.transformer import Transformer
from infer.request_limits import MAX_FULL_CONTEXTS


def make_cache(
    model: Transformer,
    capacity: int,
    num_rows: int = 1,
    *,
    settings: CacheSettings | None = None,
    step_tokens: int | None = None,
    pool_pages: int | None = None,
) -> PagedCache:
    """Return a cache whose rows get up to `step_tokens` tokens in one step. None means the model's limit.

    It has `pool_pages` pages, or enough pages for all rows when full. Raises InvalidRequestError, with nothing
    allocated, if the available memory would not hold all pages.
    """
    settings = settings or CacheSettings()
    kv_type, layers = _kv_type(model, settings), model.own_mixers
    step_tokens = step_tokens or model.step_limits.tokens
    check_rows_fit(
        layers,
        model.architecture.vocab_size,
        settings,
        kv_type,
        num_tokens=capacity,
        num_rows=num_rows,
        pool_pages=pool_pages,
        step_tokens=step_tokens,
        available=model.backend.available_bytes(),
    )
    with ops.using(model.backend):
        return PagedCache(
            layers,
            num_rows,
            capacity,
            kv_type,
            model.device,
            step_tokens=step_tokens,
            settings=settings,
            context=model.architecture.most_positions,
            pool_pages=pool_pages,
        )


def default_pool_pages(model: Transformer, settings: CacheSettings) -> int:
    """Return the pages of 1 to 8 full contexts: as many contexts as the available memory holds."""
    each, available = num_pages(model.max_seq_len, settings.page_tokens), model.backend.available_bytes()
    kv_type, num_tokens = _kv_type(model, settings), model.max_seq_len
    layers, vocab_size = model.architecture.cached_mixers, model.architecture.vocab_size
    for count in range(MAX_FULL_CONTEXTS, 1, -1):
        with suppress(InvalidRequestError):
            check_rows_fit(
                layers,
                vocab_size,
                settings,
                kv_type,
                num_tokens=num_tokens,
                num_rows=count,
                step_tokens=model.step_limits.tokens,
                available=available,
            )
            return count * each
    return each


def _kv_type(model: Transformer, settings: CacheSettings) -> str:
    return model.kv_type if settings.kv_type == "auto" else settings.kv_type
