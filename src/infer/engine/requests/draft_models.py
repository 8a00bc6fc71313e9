"""Load a draft model beside a model, after a check that both have the same vocabulary."""

from infer.compute.kvcache.cache_settings import CacheSettings
from infer.engine.runner.runner import Runner
from infer.engine.step.model_drafter import ModelDrafter
from infer.errors import InvalidRequestError
from infer.model_settings import ModelSettings
from infer.models.draft_plan import DraftPlan, plan_draft
from infer.models.from_checkpoint import load_checked, load_tokenizer
from infer.models.load import OnProgress
from infer.models.transformer import Transformer
from infer.text.tokenizer import Tokenizer

_MOST_UNSHARED = 64  # a vocabulary may have a 64th more tokens than the other, which are never drafted


def load_draft_model(
    settings: ModelSettings, model: Transformer, tokenizer: Tokenizer, on_progress: OnProgress | None = None
) -> tuple[Transformer, DraftPlan] | None:
    """Return the draft model that the settings name, or None if they name none.

    Raises InvalidRequestError if it cannot draft for the model, and ModelError if it is not usable or does not fit in
    the memory that the model has left.
    """
    if (plan := plan_draft(settings, model.max_seq_len)) is None:
        return None
    if model.architecture.reads_whole_texts:
        raise InvalidRequestError(f"draft_model: {model.architecture.family} is an encoder and generates no text")
    own = load_tokenizer(plan.checkpoint)
    check_vocabularies(str(settings.draft_model), own, tokenizer)
    return load_checked(plan.checkpoint.without_metadata(), own, plan.settings, on_progress), plan


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


def make_drafter(draft: Transformer, plan: DraftPlan, num_slots: int, vocab_size: int) -> ModelDrafter:
    """Return the drafter of a loaded draft model, with a cache for as many slots as its model has."""
    options = {"num_slots": num_slots, "pool_pages": plan.pool_pages}
    runner = Runner(draft, draft.max_seq_len, **options, capture=plan.settings.capture, settings=CacheSettings())
    return ModelDrafter(runner, vocab_size)
