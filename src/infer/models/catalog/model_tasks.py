"""The tasks for which a model's files have heads, named like the commands."""

from typing import Literal

from infer.files import Checkpoint

Task = Literal["embed", "rerank", "classify"]


def tasks_of(checkpoint: Checkpoint, *, is_encoder: bool) -> tuple[Task, ...]:
    """Return the tasks of a model. A decoder without any of these heads has none, because it generates."""
    found: dict[Task, bool] = {
        "embed": checkpoint.embedding is not None or (is_encoder and checkpoint.classifier is None),
        "rerank": checkpoint.reranker is not None,
        "classify": checkpoint.classifier is not None and len(checkpoint.classifier.labels) > 1,
    }
    return tuple(task for task, is_true in found.items() if is_true)
