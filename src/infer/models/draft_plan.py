"""The plan of a draft model: the settings with which it is loaded beside its model, and its memory, from headers."""

from dataclasses import replace
from typing import NamedTuple

from infer.compute.kvcache.cache_settings import CacheSettings
from infer.compute.kvcache.pages import num_pages
from infer.compute.operands.architecture import Architecture
from infer.errors import InvalidRequestError
from infer.files import Checkpoint, open_checkpoint
from infer.model_settings import ModelSettings
from infer.models.families import make_architecture
from infer.models.memory.memory_budget import MemoryBudget
from infer.models.memory.memory_estimate import LoadSettings

_FULL_ROWS = 2  # of the draft model's cache, in pages: most rows have only the end of a text


class DraftPlan(NamedTuple):
    """An open draft model, its settings, and the pages of its cache."""

    checkpoint: Checkpoint
    architecture: Architecture
    settings: ModelSettings
    pool_pages: int

    def budget(self, load: LoadSettings) -> MemoryBudget:
        """Return the memory that the draft model needs beside its model: weights, buffers of steps, and cache."""
        headers = self.architecture, self.checkpoint.tensors, replace(load, precision=self.settings.precision)
        num_tokens = self.settings.max_seq_len or self.architecture.own_length
        return MemoryBudget.of(*headers, CacheSettings(), num_tokens=num_tokens, pool_pages=self.pool_pages)


def plan_draft(settings: ModelSettings, num_tokens: int) -> DraftPlan | None:
    """Return the plan of the draft model that the settings name, for texts of `num_tokens`. None if they name none.

    Activations have 8 bits on a CPU, because a draft need not be exact. A draft model whose rotation changes with the
    length of a text gets shorter texts. Raises InvalidRequestError for a model that cannot draft.
    """
    if settings.draft_model is None:
        return None
    name = str(settings.draft_model)
    if settings.tensor_parallel > 1:
        raise InvalidRequestError(f"draft_model={name!r:.200} needs a model in one process: leave out tensor_parallel")
    checkpoint = open_checkpoint(settings.draft_model)
    architecture = make_architecture(checkpoint.config)
    if architecture.reads_whole_texts:
        raise InvalidRequestError(f"draft_model={name!r:.200} generates no text: name a smaller decoder")
    longest = min([num_tokens, architecture.most_positions, *[long.beyond for long in architecture.long_ropes]])
    precision = "fast" if settings.device == "cpu" else settings.precision
    same = {name: getattr(settings, name) for name in ("threads", "weights", "dtype", "capture", "device")}
    own = ModelSettings(**same, precision=precision, max_seq_len=longest)
    return DraftPlan(checkpoint, architecture, own, _FULL_ROWS * num_pages(longest, CacheSettings().page_tokens))


def plan_draft_bytes(settings: ModelSettings, num_tokens: int, load: LoadSettings) -> int:
    """Return the bytes of the draft model that the settings name, or 0 if they name none. Raises as `plan_draft`."""
    plan = plan_draft(settings, num_tokens)
    return 0 if plan is None else plan.budget(load).model
