"""Read the facts about a model from its headers, and the tasks for which its files have heads. Loads no torch."""

import hashlib
from functools import lru_cache
from pathlib import Path
from typing import Literal

from infer.files import Checkpoint, open_checkpoint, resolve
from infer.files.generation_config import defaults_of
from infer.files.hub.find import FileVersion, file_versions
from infer.models.catalog.model_facts import ModelFacts
from infer.models.catalog.models_at_hand import weights_name
from infer.models.families import make_architecture
from infer.models.memory.memory_estimate import weights_by_type
from infer.text.tokenizer.infill import find_marks
from infer.text.tokenizer.tokenizer_files import read_template, read_token_names
from infer.text.toolcalls.answer_format import reasoning_of

Task = Literal["embed", "rerank", "classify"]


def tasks_of(checkpoint: Checkpoint, *, is_encoder: bool) -> tuple[Task, ...]:
    """Return the tasks of a model. A decoder without any of these heads has none, because it generates."""
    found: dict[Task, bool] = {
        "embed": checkpoint.embedding is not None or (is_encoder and checkpoint.classifier is None),
        "rerank": checkpoint.reranker is not None,
        "classify": checkpoint.classifier is not None and len(checkpoint.classifier.labels) > 1,
    }
    return tuple(task for task, is_true in found.items() if is_true)


_MOST_MODELS = 256  # most models whose facts are cached


def read_facts(model: str) -> ModelFacts:
    """Return the facts about a model, the value of `--model`. Raises the errors of opening it."""
    return _facts(resolve(model), file_versions(model))


@lru_cache(_MOST_MODELS)
def _facts(path: Path, versions: tuple[FileVersion, ...]) -> ModelFacts:
    """Read the facts. `versions` only distinguishes files with the same path."""
    checkpoint = open_checkpoint(path)
    architecture = make_architecture(checkpoint.config)
    is_encoder = architecture.reads_whole_texts
    template = "" if is_encoder else read_template(checkpoint.path, checkpoint.metadata) or ""
    known = read_token_names(checkpoint.path, checkpoint.metadata)
    abilities = {
        "completion": not is_encoder,
        "tools": bool(template),  # a template without tools gets a prompt of ours
        "insert": find_marks(lambda names: {name: 0 for name in names if name in known}) is not None,
        "thinking": reasoning_of(template) is not None,
        "embedding": "embed" in tasks_of(checkpoint, is_encoder=is_encoder),
    }
    return ModelFacts(
        file_format="safetensors" if checkpoint.path.is_dir() else "gguf",
        family=str(checkpoint.config.get("model_type")),
        num_parameters=sum(row[3] for row in weights_by_type(checkpoint.tensors)),
        weights=weights_name(checkpoint.metadata, checkpoint.tensors),
        num_bytes=sum(file.size for file in checkpoint.files),
        modified_at=max((file.path.stat().st_mtime for file in checkpoint.files), default=0.0),
        digest=hashlib.sha256(checkpoint.fingerprint().encode()).hexdigest(),
        context=architecture.own_length,
        embedding_size=architecture.hidden_size,
        template=template,
        sampling=dict(defaults_of(checkpoint)),
        abilities=tuple(name for name, is_true in abilities.items() if is_true),
    )
