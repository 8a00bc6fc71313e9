"""Steps of several rows as one, and the network of a file with its logits."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from infer.compute import ops
from infer.compute.kvcache.cache_settings import CacheSettings
from infer.compute.operands.step import Step
from infer.engine.runner.runner import make_cache
from infer.files import open_checkpoint
from infer.files.tensors.lazy_weights import LazyWeights
from infer.models.families import make_architecture
from infer.models.load import load_transformer
from infer.models.transformer import Transformer


def join(steps: Sequence[Step]) -> Step:
    """Return the steps of several rows as one step."""
    offsets = [0]
    for step in steps:
        offsets.append(offsets[-1] + len(step.tokens))
    return Step(
        tokens=torch.cat([each.tokens for each in steps]),
        positions=torch.cat([each.positions for each in steps]),
        rows=torch.cat([each.rows for each in steps]),
        logit_indices=torch.cat([each.logit_indices + start for each, start in zip(steps, offsets, strict=False)]),
    )


def load_network(path: Path, **options: Any) -> Transformer:
    """Return the network of a folder or a file, without its tokenizer. `options` are those of `load_transformer`."""
    checkpoint = open_checkpoint(path)
    made = {"backend": ops.backend_of(torch.device("cpu"))} | options
    return load_transformer(make_architecture(checkpoint.config), LazyWeights(checkpoint.tensors), **made)


@torch.inference_mode()
def logits_of(model: Transformer, token_ids: Sequence[int], settings: CacheSettings | None = None) -> Tensor:
    """Return the logits after each token, with a new cache."""
    cache = make_cache(model, len(token_ids), settings=settings)
    cache.reserve(0, len(token_ids))
    return model.forward(Step.of(token_ids, logit_indices=range(len(token_ids))), cache).clone()
