"""Make the cache of a model, or refuse it if it does not fit the available memory."""

from infer.compute import ops
from infer.compute.kvcache.cache_settings import CacheSettings
from infer.compute.kvcache.paged import PagedCache
from infer.models.memory.cache_plan import CachePlan, check_rows_fit, plan_cache, rows_bytes
from infer.models.transformer import Transformer


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


def plan_rows(model: Transformer, settings: CacheSettings, pool_pages: int | None) -> CachePlan:
    """Return the cache of a step's rows in the available memory, with `pool_pages` pages if these are given."""
    layers, num_tokens, limits = model.architecture.cached_mixers, model.max_seq_len, model.step_limits
    sizes = {"num_tokens": num_tokens, "num_rows": limits.logits}

    def needed(settings: CacheSettings, pages: int) -> int:
        kv_type, vocab_size = _kv_type(model, settings), model.architecture.vocab_size
        return rows_bytes(layers, vocab_size, settings, kv_type, **sizes, pool_pages=pages, step_tokens=limits.tokens)

    available = model.backend.available_bytes()
    return plan_cache(layers, settings, **sizes, pool_pages=pool_pages, available=available, needed=needed)


def _kv_type(model: Transformer, settings: CacheSettings) -> str:
    return model.kv_type if settings.kv_type == "auto" else settings.kv_type
