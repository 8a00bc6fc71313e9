"""Layers without one of their parts: a model whose layers were divided in two computes the same bits."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from infer.compute import ops
from infer.compute.backends.cpu.capture.forward import CapturedForward
from infer.compute.operands.architecture import Architecture
from infer.compute.operands.step import Step
from infer.compute.operands.weights import FileWeight
from infer.engine.runner.caches import make_cache
from infer.files import open_checkpoint
from infer.files.tensors.lazy_weights import LazyWeights
from infer.models.families import make_architecture
from infer.models.load import load_transformer
from infer.models.transformer import Transformer
from tiny import BY_NAME, make_tiny

IDS = [(i * 37) % 90 + 3 for i in range(40)]


def load_both(folder: Path) -> tuple[Transformer, Transformer]:
    """Return a tiny Gemma, and the same with each layer as two, one without a feed-forward and one without a mixer."""
    make_tiny(BY_NAME["gemma3"], folder)
    checkpoint = open_checkpoint(folder)
    architecture, weights = make_architecture(checkpoint.config), LazyWeights(checkpoint.tensors)
    parts: tuple[dict[str, Any], ...] = ({"feed_forward": None}, {"mixer": None})
    halves = [replace(layer, **part) for layer in architecture.layers for part in parts]
    named = {halved_name(name): weight for name, weight in weights.items()}
    return load(architecture, dict(weights)), load(replace(architecture, layers=tuple(halves)), named)


def halved_name(name: str) -> str:
    if not name.startswith("model.layers."):
        return name
    index, rest = name.removeprefix("model.layers.").split(".", 1)
    return f"model.layers.{2 * int(index) + ('mlp' in rest)}.{rest}"


def load(architecture: Architecture, weights: dict[str, FileWeight]) -> Transformer:
    return load_transformer(architecture, weights, backend=ops.backend_of(torch.device("cpu")))


def logits_of(model: Transformer, *, is_recorded: bool) -> Tensor:
    cache = make_cache(model, 64)

    def plain(step: Step) -> Tensor:
        return model.forward(replace(step, is_recorded=is_recorded), cache)

    forward, found = CapturedForward(plain).run if is_recorded else plain, []
    for start in range(0, len(IDS), 16):
        token_ids = IDS[start : start + 16]
        cache.reserve(0, len(token_ids))
        step = Step.of(token_ids, start)
        found.append(forward(step).clone())
        cache.commit(0, len(token_ids))
    return torch.cat(found)


def test_halves_of_layers_have_the_results_of_the_layers(tmp_path: Path) -> None:
    whole, halved = load_both(tmp_path)
    assert len(halved.layers) == 2 * len(whole.layers)
    for is_recorded in (False, True):
        assert torch.equal(logits_of(whole, is_recorded=is_recorded), logits_of(halved, is_recorded=is_recorded))


def test_only_layers_with_attention_take_memory_of_the_cache(tmp_path: Path) -> None:
    whole, halved = load_both(tmp_path)
    assert make_cache(halved, 64).num_bytes == make_cache(whole, 64).num_bytes
    assert len(make_cache(halved, 64).memory.layers) == len(whole.layers)
