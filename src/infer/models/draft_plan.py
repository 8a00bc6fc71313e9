"""The plan of a draft model or of a model's own head that drafts: its settings and its memory, from headers."""

from dataclasses import replace
from typing import NamedTuple

from infer.compute.kvcache.cache_settings import CacheSettings
from infer.compute.kvcache.pages import num_pages
from infer.compute.operands.architecture import Architecture
from infer.compute.operands.mixers import Attention
from infer.errors import InvalidRequestError
from infer.files import Checkpoint, open_checkpoint
from infer.files.tensors.tensor_info import TensorInfo
from infer.model_settings import ModelSettings
from infer.models.families import make_architecture
from infer.models.memory.memory_budget import MemoryBudget
from infer.models.memory.memory_estimate import LoadSettings, table_bytes
from infer.models.tensors import expected_shapes

_FULL_ROWS = 2  # of the draft model's cache, in pages: most rows have only the end of a text


class DraftPlan(NamedTuple):
    """The plan of a draft model, or of the model's own head: its files, its settings, and the pages of its cache."""

    checkpoint: Checkpoint
    architecture: Architecture
    settings: ModelSettings
    pool_pages: int
    is_head: bool = False  # it has the embedding and the projection to logits of its model

    def num_bytes(self, load: LoadSettings) -> int:
        """Return the memory that drafting needs beside the model: weights, buffers of steps, and cache."""
        headers = self.architecture, self.checkpoint.tensors, replace(load, precision=self.settings.precision)
        num_tokens = self.settings.max_seq_len or self.architecture.own_length
        budget = MemoryBudget.of(*headers, CacheSettings(), num_tokens=num_tokens, pool_pages=self.pool_pages)
        return budget.model - (table_bytes(self.architecture, budget.types or {}, load.device) if self.is_head else 0)


def plan_draft(settings: ModelSettings, own: Checkpoint, num_tokens: int) -> DraftPlan | None:
    """Return the plan of the draft model that the settings name, for texts of `num_tokens`.

    If they name none, it is the plan of the model's own head, or None if no head can draft. Activations of a draft
    model have 8 bits on a CPU, because a draft need not be exact. A draft model whose rotation changes with the length
    of a text gets shorter texts. Raises InvalidRequestError for a model that cannot draft.
    """
    if settings.draft_model is None:
        return _plan_head(settings, own, num_tokens)
    name = str(settings.draft_model)
    if settings.tensor_parallel > 1:
        raise InvalidRequestError(f"draft_model={name!r:.200} needs a model in one process: leave out tensor_parallel")
    checkpoint = open_checkpoint(settings.draft_model)
    architecture = make_architecture(checkpoint.config)
    if architecture.reads_whole_texts:
        raise InvalidRequestError(f"draft_model={name!r:.200} generates no text: name a smaller decoder")
    return _plan(settings, checkpoint, architecture, num_tokens)


def _plan(
    settings: ModelSettings,
    checkpoint: Checkpoint,
    architecture: Architecture,
    num_tokens: int,
    *,
    is_head: bool = False,
) -> DraftPlan:
    longest = min([num_tokens, architecture.most_positions, *[long.beyond for long in architecture.long_ropes]])
    precision = "fast" if settings.device == "cpu" and not is_head else settings.precision
    same = {name: getattr(settings, name) for name in ("threads", "weights", "dtype", "capture", "device")}
    own = ModelSettings(**same, precision=precision, max_seq_len=longest)
    pages = _FULL_ROWS * num_pages(longest, CacheSettings().page_tokens)
    return DraftPlan(checkpoint, architecture, own, pages, is_head)


def _plan_head(settings: ModelSettings, own: Checkpoint, num_tokens: int) -> DraftPlan | None:
    """Return the plan of the model's own head. None if it has none, or if the device or the settings exclude it."""
    if not (own.drafting and settings.draft_head and settings.device == "cpu" and settings.tensor_parallel == 1):
        return None
    if (head := head_of(own, make_architecture(own.config))) is None:
        return None
    architecture, tensors = head
    return _plan(settings, replace(own, tensors=tensors, drafting={}), architecture, num_tokens, is_head=True)


def head_of(own: Checkpoint, network: Architecture) -> tuple[Architecture, dict[str, TensorInfo]] | None:
    """Return the network and the tensors of a model's own head that drafts, or None if the model has none.

    A head is the network's last layer with attention. Its embedding and its projection to logits are the model's.
    """
    layers = tuple(each for each in network.layers if isinstance(each.mixer, Attention) and each.mixer.has_keys)
    if not (own.drafting and layers) or network.text_inputs is not None or network.per_layer_input is not None:
        return None
    architecture, tensors = replace(network, layers=layers[-1:], has_state_input=True), {**own.tensors, **own.drafting}
    shapes = expected_shapes(architecture)
    if any(name not in tensors or tensors[name].shape != shape for name, shape in shapes.items()):
        return None
    return architecture, {name: tensors[name] for name in shapes}


def plan_draft_bytes(settings: ModelSettings, own: Checkpoint, num_tokens: int, load: LoadSettings) -> int:
    """Return the bytes of the draft model or head of these settings, or 0 without one. Raises as `plan_draft`."""
    plan = plan_draft(settings, own, num_tokens)
    return 0 if plan is None else plan.num_bytes(load)
