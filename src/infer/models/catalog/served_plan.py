"""Plan the memory of a model that a server loads, from its headers: its context, its pages, and the total."""

from typing import NamedTuple

from infer.compute.kvcache.groups import check_layers
from infer.errors import ModelError
from infer.files import open_checkpoint
from infer.model_settings import ModelSettings
from infer.models.catalog.header_facts import tasks_of
from infer.models.draft_plan import plan_draft_bytes
from infer.models.families import make_architecture
from infer.models.memory.memory_budget import MemoryBudget, context_length
from infer.models.memory.memory_estimate import LoadSettings
from infer.models.tensors import check_tensors
from infer.system.cores import default_num_threads


class ServedPlan(NamedTuple):
    """Total memory in bytes of the process, tokens of a context, the cache (None: an encoder has none), and tasks."""

    num_bytes: int
    context: int
    cache: MemoryBudget | None
    takes: tuple[str, ...]


def plan_served(model: str, settings: ModelSettings, *, most_bytes: int, share_bytes: int) -> ServedPlan:
    """Return the plan of a model that takes at most `most_bytes`.

    The cache has the settings' `pool_pages` pages. If that is None, it has pages for as many full contexts as fit in
    `share_bytes`, from 1 to 8. Raises ModelError, which names the context that would fit, if one context is too large.
    """
    checkpoint = open_checkpoint(model)
    architecture = make_architecture(checkpoint.config)
    check_tensors(architecture, checkpoint.tensors)
    load, cache = LoadSettings.of(settings, settings.threads or default_num_threads()), settings.cache
    pool_pages = settings.pool_pages
    check_layers(cache, architecture.mixers)
    context = context_length(settings.max_seq_len, architecture, cache)
    headers = architecture, checkpoint.tensors, load, cache
    least = MemoryBudget.of(*headers, num_tokens=context, pool_pages=pool_pages)
    found = least if architecture.reads_whole_texts else least.planned(share_bytes)
    draft_bytes = plan_draft_bytes(settings, checkpoint, context, load)
    most_bytes -= draft_bytes
    if found.total > most_bytes:
        beside = found.total - least.model
        try:
            least.check(checkpoint.path.name, max(0, most_bytes - beside))
        except ModelError as error:
            allowed, taken = (most_bytes + draft_bytes) // 1_000_000, (beside + draft_bytes) // 1_000_000
            raise ModelError(
                f"{error}; {allowed:,} MB are allowed, and the process takes {taken:,} MB of them"
            ) from error
    tasks = tasks_of(checkpoint, is_encoder=architecture.reads_whole_texts)
    plan = None if architecture.reads_whole_texts else found
    return ServedPlan(found.total + draft_bytes, context, plan, tasks or ("generate",))
