"""Prompts of an embedding model → keys in our own namespace, as described in `heads.text_prompts`."""

from infer.files import Checkpoint
from infer.files.heads.text_prompts import ARE_POOLED_KEY, DEFAULT_KEY, NAMES_KEY, TEXTS_KEY
from infer.models.gguf_export.values import Value


def prompt_values(checkpoint: Checkpoint) -> dict[str, Value]:
    """Return the keys, or none for a model without prompts."""
    prompts = checkpoint.prompts
    if not prompts.by_name:
        return {}
    values: dict[str, Value] = {NAMES_KEY: list(prompts.by_name), TEXTS_KEY: list(prompts.by_name.values())}
    if prompts.default is not None:
        values[DEFAULT_KEY] = prompts.default
    if checkpoint.embedding is not None and checkpoint.embedding.skips_prompt:
        values[ARE_POOLED_KEY] = False
    return values
