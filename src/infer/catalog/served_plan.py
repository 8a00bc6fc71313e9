"""Plan the memory of a model that a server loads, from its headers: its context, its pages, and the total."""

from typing import NamedTuple

from infer.catalog.model_tasks import tasks_of
from infer.checkpoint import open_checkpoint
from infer.errors import ModelError
from infer.kvcache.cache_settings import CacheSettings
from infer.kvcache.groups import check_layers
from infer.kvcache.pages import num_pages
from infer.model.context_length import context_length
from infer.model.families import make_architecture
from infer.model.memory_estimate import Estimate, LoadSettings, check_fits, estimate
from infer.model.tensors import check_tensors
from infer.request_limits import MAX_FULL_CONTEXTS


class ServedPlan(NamedTuple):
    """Total memory in bytes of the process, tokens of a context, pages of the cache (None: it has no pages), tasks."""

    num_bytes: int
    context: int
    pool_pages: int | None
    takes: tuple[str, ...]


def plan_served(
    model: str,
    load: LoadSettings,
    cache: CacheSettings,
    *,
    max_seq_len: int | None,
    pool_pages: int | None,
    most_bytes: int,
    share_bytes: int,
) -> ServedPlan:
    """Return the plan of a model that takes at most `most_bytes`.

    The cache has `pool_pages` pages. If that is None, it has pages for as many full contexts as fit in `share_bytes`,
    from 1 to 8. Raises ModelError, which names the context that would fit, if one context is too large.
    """
    checkpoint = open_checkpoint(model)
    architecture = make_architecture(checkpoint.config)
    check_tensors(architecture, checkpoint.tensors)
    check_layers(cache, architecture.mixers)
    context = context_length(max_seq_len, architecture, cache)
    model_headers = (architecture, checkpoint.tensors, load, cache)

    def needed(pages: int | None, num_rows: int) -> Estimate:
        return estimate(*model_headers, num_tokens=context, num_rows=num_rows, pool_pages=pages)

    if architecture.reads_whole_texts:
        pages, num_rows = None, 1
    else:
        each, num_rows = num_pages(context, cache.page_tokens), load.step.logits
        counts = [pool_pages] if pool_pages else [each * count for count in range(MAX_FULL_CONTEXTS, 0, -1)]
        pages = next((count for count in counts if needed(count, num_rows).total <= share_bytes), counts[-1])
    found = needed(pages, num_rows)
    if found.total > most_bytes:
        beside = found.process + found.total - needed(pages, 1).total  # not of the weights or of a context
        try:
            check_fits(checkpoint.path.name, *model_headers, num_tokens=context, available=max(0, most_bytes - beside))
        except ModelError as error:
            allowed, taken = most_bytes // 1_000_000, beside // 1_000_000
            raise ModelError(
                f"{error}; {allowed:,} MB are allowed, and the process takes {taken:,} MB of them"
            ) from error
    tasks = tasks_of(checkpoint, is_encoder=architecture.reads_whole_texts)
    return ServedPlan(found.total, context, pages, tasks or ("generate",))
