"""Load a draft model beside a model, after a check that both have the same vocabulary, or the model's own head."""

import logging
from dataclasses import replace

import torch

from infer.compute.kvcache.cache_settings import CacheSettings
from infer.engine.runner.runner import Runner
from infer.engine.runner.token_states import HeadInput, TokenStates
from infer.engine.step.model_drafter import FIRST_TOKENS, ModelDrafter
from infer.errors import InvalidRequestError
from infer.files import Checkpoint
from infer.files.tensors.lazy_weights import LazyWeights
from infer.model_settings import ModelSettings
from infer.models.compile_ahead import make_outline
from infer.models.draft_plan import DraftPlan, plan_draft
from infer.models.from_checkpoint import load_checked, load_tokenizer
from infer.models.load import OnProgress, load_transformer
from infer.models.memory.memory_estimate import LoadSettings
from infer.models.transformer import Transformer
from infer.text.tokenizer import Tokenizer

log = logging.getLogger("infer.server")
_MOST_UNSHARED = 64  # a vocabulary may have a 64th more tokens than the other, which are never drafted


def load_draft_model(
    settings: ModelSettings,
    checkpoint: Checkpoint,
    model: Transformer,
    tokenizer: Tokenizer,
    on_progress: OnProgress | None = None,
) -> tuple[Transformer, DraftPlan] | None:
    """Return the draft model that the settings name, or the model's own head. None if nothing drafts.

    Raises InvalidRequestError if it cannot draft for the model, and ModelError if it is not usable or does not fit in
    the memory that the model has left. A head that does not fit is left out.
    """
    if settings.device == "auto":
        settings = replace(settings, device=model.backend.memory_rules)
    if (plan := plan_draft(settings, checkpoint, model.max_seq_len)) is None:
        return None
    if plan.is_head:
        return _load_head(settings, plan, model)
    if model.architecture.reads_whole_texts:
        raise InvalidRequestError(f"draft_model: {model.architecture.family} is an encoder and generates no text")
    own = load_tokenizer(plan.checkpoint)
    check_vocabularies(str(settings.draft_model), own, tokenizer)
    return load_checked(plan.checkpoint.without_metadata(), own, plan.settings, on_progress), plan


def _load_head(settings: ModelSettings, plan: DraftPlan, model: Transformer) -> tuple[Transformer, DraftPlan] | None:
    """Return the model's own head, or None if it does not fit in the memory that the model has left."""
    backend, own = model.backend, plan.settings
    load = LoadSettings.of(own, backend.num_threads(), backend.memory_rules)
    available, num_bytes = backend.available_bytes(), plan.num_bytes(load)
    if available is not None and num_bytes > available:
        log.warning("the model's head that drafts needs %d MB and is left out", num_bytes // 10**6)
        return None
    outline = make_outline(plan.architecture, plan.checkpoint.tensors, own)
    with backend.compiling([outline]), backend.threads():
        head = load_transformer(
            plan.architecture,
            LazyWeights(plan.checkpoint.tensors),
            backend=backend,
            dtype=None if own.dtype == "auto" else getattr(torch, own.dtype),
            keep_floats_as=own.weights,
            precision=own.precision,
            max_seq_len=own.max_seq_len,
            shared=model,
        )
    return head, plan


def check_vocabularies(name: str, draft: Tokenizer, tokenizer: Tokenizer) -> None:
    """Raise InvalidRequestError if an id stands for other bytes in the draft model's vocabulary."""
    own, others = draft.token_bytes, tokenizer.token_bytes
    differing = next((i for i, (left, right) in enumerate(zip(own, others, strict=False)) if left != right), None)
    if differing is None and abs(len(own) - len(others)) * _MOST_UNSHARED <= len(others):
        return
    token = (
        "" if differing is None else f", and token {differing} is {own[differing]!r:.40}, not {others[differing]!r:.40}"
    )
    raise InvalidRequestError(
        f"draft_model={name!r:.200} has another vocabulary than the model: {len(own):,} tokens, not {len(others):,}"
        f"{token}: name a smaller model of the same family"
    )


def make_drafter(
    draft: Transformer, plan: DraftPlan, model: Transformer, num_slots: int, vocab_size: int
) -> ModelDrafter:
    """Return the drafter of a loaded draft model, with a cache for as many slots as its model has.

    A head reads the states that the model's runner keeps for it, in `head_input.states`.
    """
    own = TokenStates(draft, 1) if plan.is_head else None
    options = {"num_slots": num_slots, "pool_pages": plan.pool_pages}
    runner = Runner(
        draft, draft.max_seq_len, **options, capture=plan.settings.capture, settings=CacheSettings(), states=own
    )
    head_input = None if own is None else HeadInput(draft, TokenStates(model, FIRST_TOKENS), own)
    return ModelDrafter(runner, vocab_size, head_input)
