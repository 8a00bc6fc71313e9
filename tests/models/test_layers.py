"""Parts of layers: layers that were divided in two compute the same bits, and gates and scaled queries of attention."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from byte_tokenizer import write_byte_tokenizer
from commands import run
from infer.compute import ops
from infer.compute.backends.cpu.capture.forward import CapturedForward
from infer.compute.backends.cuda.backend import CudaBackend
from infer.compute.backends.unusual_layers import check_unusual_parts
from infer.compute.kvcache.cache_settings import CacheSettings
from infer.compute.operands.activation_values import Activations
from infer.compute.operands.architecture import Architecture
from infer.compute.operands.step import Chunk, Step
from infer.compute.operands.weights import FileWeight, Heads
from infer.engine.runner.caches import make_cache
from infer.engine.runner.runner import Runner
from infer.errors import UnsupportedModelError
from infer.files import open_checkpoint
from infer.files.tensors.lazy_weights import LazyWeights
from infer.models.families import make_architecture
from infer.models.load import load_transformer
from infer.models.transformer import Transformer
from layer_caches import make_layer
from steps import load_network
from tiny import BY_NAME, GATED, MINISTRAL3, Tiny, make_tiny

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


PARTS = [
    (GATED[0], "output gates", ", q and k norms (head), output gates, "),
    (MINISTRAL3[0], "scaled queries", ", queries that grow every 16 tokens"),
    (BY_NAME["qwen3_moe"], "experts", ", experts, 3 of 20 chosen by softmax, mlp 64, silu"),
    (BY_NAME["llama4_chunks"], "attention in chunks, experts, scaled queries", "chunks of 23 tokens, "),
    (BY_NAME["llama4_chunks"], "attention in chunks, experts, scaled queries", "weighted inputs of experts"),
]


@pytest.mark.parametrize(("tiny", "part", "told"), PARTS)
def test_opencl_refuses_a_part_of_cudas_and_explain_names_it(tiny: Tiny, part: str, told: str, tmp_path: Path) -> None:
    make_tiny(tiny, tmp_path)
    write_byte_tokenizer(tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    architecture = make_architecture(checkpoint.config)
    with pytest.raises(UnsupportedModelError, match=f"^device opencl has no kernels for {part}: use device cpu$"):
        check_unusual_parts(architecture.layers, "opencl")
    CudaBackend(torch.device("cpu")).check_layers(architecture.layers)
    assert told in run("explain", tmp_path).out


def test_weights_of_attention_do_not_depend_on_gates() -> None:
    heads = Heads(4, 2, 32, 32**-0.5, None, None, None)
    qkv = torch.randn(20, 12 * 32, generator=torch.manual_seed(0))
    found = []
    for gate_start, num_columns in ((None, 8 * 32), (8 * 32, 12 * 32)):
        own, columns = replace(heads, gate_start=gate_start), qkv[:, :num_columns].contiguous()
        layer = make_layer(own, 1, 64)
        ops.attend(Activations(columns), own, layer, Step.of([1] * 20))
        found.append(ops.attention_weights(columns, own, layer, Step.of([1] * 20)))
    assert torch.equal(*found)


@torch.inference_mode()
def test_a_prompt_that_snapkv_cuts_is_the_same_in_chunks_of_any_size(tmp_path: Path) -> None:
    make_tiny(GATED[0], tmp_path)
    model = load_network(tmp_path)
    settings = CacheSettings(page_tokens=16, eviction_policy="snapkv", eviction_window=48, protected_prefix=3)
    prompt = torch.randint(3, 96, (120,), generator=torch.manual_seed(0)).tolist()
    found = []
    for chunk in (120, 50, 7):
        runner = Runner(model, 200, settings=settings)
        for start in range(0, len(prompt), chunk):
            runner.extend(0, prompt[start : start + chunk])
        runner.after_prompt(0, prompt)
        runner.reserve(0, 1)
        found.append(runner.forward([Chunk(0, [5])]).clone())
    assert all(torch.equal(each, found[0]) for each in found)
    whole = Runner(model, 200)
    whole.extend(0, prompt)
    whole.reserve(0, 1)
    assert not torch.equal(whole.forward([Chunk(0, [5])]), found[0])
