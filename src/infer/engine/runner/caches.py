"""Make the cache of a model, or refuse it if it does not fit the available memory."""

from collections.abc import Callable, Sequence

from torch import Tensor

from infer.compute import ops
from infer.compute.kvcache.cache_settings import CacheSettings
from infer.compute.kvcache.paged import PagedCache
from infer.compute.operands.limits import StepLimits
from infer.compute.operands.mixers import Mixer
from infer.compute.operands.step import Step
from infer.compute.ops import Backend
from infer.models.memory.memory_budget import MemoryBudget
from infer.models.memory.memory_estimate import LoadSettings
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
    settings, step_tokens = settings or CacheSettings(), step_tokens or model.step_limits.tokens
    limits = StepLimits(step_tokens, num_rows)
    budget = _budget_of(model, model.own_mixers, settings, limits, num_tokens=capacity, pool_pages=pool_pages)
    budget.check_rows(model.backend.available_bytes())
    with ops.using(model.backend):
        return PagedCache(
            budget.layers,
            num_rows,
            capacity,
            budget.kv_type,
            model.device,
            step_tokens=step_tokens,
            settings=settings,
            context=model.architecture.most_positions,
            pool_pages=pool_pages,
        )


def plan_rows(model: Transformer, settings: CacheSettings, pool_pages: int | None) -> MemoryBudget:
    """Return the budget of a step's rows in the available memory, with `pool_pages` pages if these are given."""
    # The ranks of a model share a host's memory, but each GPU belongs to one of them.
    layers = model.architecture.cached_mixers if model.backend.computes_on_host else model.own_mixers
    budget = _budget_of(model, layers, settings, model.step_limits, num_tokens=model.max_seq_len, pool_pages=pool_pages)
    return budget.planned(model.backend.available_bytes())


def record_step(
    forward: Callable[[Step, PagedCache], Tensor], backend: Backend, cache: PagedCache, num_tokens: int, num_logits: int
) -> ops.Recorded | None:
    """Return `forward` over an empty cache, recorded for steps up to these sizes. None if nothing is recorded."""
    cache.reserve(0, 1)  # for the step that is recorded and not run
    recorded = backend.capture(lambda step: forward(step, cache), num_tokens, num_logits)
    cache.truncate(0, 0)
    return recorded


def _budget_of(
    model: Transformer,
    layers: Sequence[Mixer],
    settings: CacheSettings,
    limits: StepLimits,
    *,
    num_tokens: int,
    pool_pages: int | None,
) -> MemoryBudget:
    """Return the budget of `limits.logits` rows of a loaded model."""
    kv_type = model.kv_type if settings.kv_type == "auto" else settings.kv_type
    load = LoadSettings(device=model.device.type, limits=limits)
    return MemoryBudget(model.architecture, layers, kv_type, load, settings, num_tokens, limits.logits, pool_pages)
