"""Claims about every usual card, model and context: what loads, with how many pages, and never more than the card has.

A refusal names an option with a value that then fits. All of it is arithmetic: nothing is loaded.
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest

from infer import ModelError
from infer.compute.kvcache.cache_settings import CacheSettings
from infer.compute.operands.architecture import Architecture
from infer.compute.operands.limits import GPU_STEP
from infer.models.families import make_architecture
from infer.models.memory.memory_budget import MemoryBudget
from infer.models.memory.memory_estimate import LoadSettings
from infer.models.tensors import expected_shapes
from refusals import refusal

CARDS = 8, 12, 16, 24, 48, 80, 141  # GB
CONTEXT_BYTES = 500 << 20  # that CUDA takes before anything is loaded
CONTEXTS = 2048, 8192, 32_768, 131_072
_SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
_STATES = {
    "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4, "full_attention_interval": 4, "head_dim": 256, "num_key_value_heads": 4,
}  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {
    "1B": dict(zip(_SIZES, (128_256, 2048, 8192, 16, 32), strict=True)) | {"head_dim": 64, "tie_word_embeddings": True},
    "8B": dict(zip(_SIZES, (128_256, 4096, 14_336, 32, 32), strict=True)),
    "32B": dict(zip(_SIZES, (152_064, 5120, 27_648, 64, 40), strict=True)),
    "Qwen3.5-4B": dict(zip(_SIZES, (248_320, 2560, 9216, 32, 16), strict=True))
    | {"model_type": "qwen3_5_text", "tie_word_embeddings": True, **_STATES},
}
COMMON = {"model_type": "llama", "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "max_position_embeddings": 131_072}
TYPES = "Q4_K", "BF16"
MODELS = list(product(CONFIGS, TYPES))


@cache
def model(name: str, type_: str) -> tuple[Architecture, Mapping[str, Any]]:
    """Return the architecture and the headers. Q4_K_M has a quarter of its matrices in Q6_K, and so has this."""
    architecture = make_architecture(COMMON | CONFIGS[name])

    def stored(name: str, shape: tuple[int, ...]) -> str:
        if len(shape) == 1 or "conv" in name:
            return "F32"
        return "Q6_K" if type_ == "Q4_K" and ("down_proj" in name or "embed" in name) else type_

    tensors = {
        name: SimpleNamespace(type=stored(name, shape), shape=shape)
        for name, shape in expected_shapes(architecture).items()
    }
    return architecture, tensors


@cache
def whole_budget(name: str, type_: str, num_tokens: int, device: str = "cuda", weights: str = "auto") -> MemoryBudget:
    load = LoadSettings(device=device, weights=weights)
    return MemoryBudget.of(*model(name, type_), load, CacheSettings(), num_tokens=num_tokens)


def available(card: int) -> int:
    return card * 10**9 - CONTEXT_BYTES


def loaded(budget: MemoryBudget) -> MemoryBudget:
    """Return the budget after the weights are loaded."""
    return replace(budget, tensors=None, types=None, num_rows=budget.load.step.logits)


def opened(budget: MemoryBudget, free: int) -> MemoryBudget:
    """Load a model by arithmetic, as `LLM` does, and return the budget of its cache. Raises ModelError as it does."""
    found = budget.with_step_that_fits(free)
    found.check("it", free)
    plan = loaded(found).planned(free - found.weights)
    plan.check_rows(free - found.weights)
    assert found.weights + plan.model <= free, "parts are never over the card"
    assert plan.model == sum(plan.buffers) + plan.history + sum(plan.pools)
    return plan


@pytest.mark.slow(cases=4)
@pytest.mark.parametrize(("name", "type_"), MODELS)
def test_what_loads_fills_the_card_and_is_never_over_it(name: str, type_: str) -> None:
    for card, num_tokens in product(CARDS, CONTEXTS):
        free, budget = available(card), whole_budget(name, type_, num_tokens)
        try:
            plan = opened(budget, free)
        except ModelError:
            assert budget.with_step_that_fits(free).model > free
            continue
        assert plan.pool_pages is not None
        used = plan.model + budget.weights
        most = plan.load.step.logits * -(-num_tokens // 64)
        is_whole = plan.pool_pages >= most
        assert -(-num_tokens // 64) <= plan.pool_pages <= most
        assert is_whole or used > 0.8 * free, "nothing stays idle that the pool could use"
        if plan.pools[1]:
            assert plan.pools[1] <= 0.3 * free or plan.settings.state_memory_mb == smallest_states(budget)


def smallest_states(budget: MemoryBudget) -> int | None:
    return budget._with_states(0).settings.state_memory_mb


@pytest.mark.slow(cases=4)
@pytest.mark.parametrize(("name", "type_"), MODELS)
def test_each_refusal_names_an_option_with_a_value_that_then_fits(name: str, type_: str) -> None:
    for card, num_tokens in product(CARDS, CONTEXTS):
        free = available(card)
        budget = whole_budget(name, type_, num_tokens).with_step_that_fits(free)
        if budget.model <= free:
            continue
        message = refusal(lambda budget=budget, free=free: budget.check("it", free), ModelError)
        options = dict(re.findall(r"(\w+)=(\w+)", message.rpartition(": ")[2]))
        if not options:
            assert message.endswith("use a smaller quantisation of it, or a smaller model")
            for weights in ("auto", "q8", "q4") if type_ == "BF16" else ("auto",):
                assert whole_budget(name, type_, 512, weights=weights).with_step_that_fits(free).model > free
            continue
        length, weights = int(options.get("max_seq_len", num_tokens)), options.get("weights", "auto")
        assert "fits" in message
        assert opened(whole_budget(name, type_, length, weights=weights), free).num_tokens == length


# Pages for a context of 8,192 tokens, of the cards from 8 to 141 GB. 0: the model is refused.
PAGES = {
    ("1B", "Q4_K"): [2496, 3825, 5347, 8847, 19401, 34421, 63054],
    ("1B", "BF16"): [1732, 3061, 4582, 8083, 18636, 33657, 62289],
    ("8B", "Q4_K"): [156, 472, 941, 1653, 3869, 7624, 14782],
    ("8B", "BF16"): [0, 0, 0, 382, 2598, 6353, 13511],
    ("32B", "Q4_K"): [0, 0, 0, 0, 1167, 2519, 6098],
    ("32B", "BF16"): [0, 0, 0, 0, 0, 177, 3505],
    ("Qwen3.5-4B", "Q4_K"): [1211, 2485, 4164, 6712, 14164, 27334, 52397],
    ("Qwen3.5-4B", "BF16"): [0, 591, 1846, 4394, 11846, 25016, 50080],
}


@pytest.mark.slow(cases=4)
@pytest.mark.parametrize(("name", "type_"), MODELS)
def test_each_card_has_these_pages(name: str, type_: str) -> None:
    def num_pages(card: int) -> int:
        try:
            return opened(whole_budget(name, type_, 8192), available(card)).pool_pages or 0
        except ModelError:
            return 0

    assert [num_pages(card) for card in CARDS] == PAGES[name, type_]


def test_a_pool_that_is_given_is_refused_with_one_that_fits() -> None:
    free = available(24)
    budget = replace(whole_budget("8B", "BF16", 8192), pool_pages=100_000).with_step_that_fits(free)
    message = refusal(lambda: budget.check("it", free), ModelError)
    pages = int(re.findall(r"pool_pages=(\d+) fits", message)[0])
    assert opened(replace(budget, pool_pages=pages), free).pool_pages == pages
    assert replace(budget, pool_pages=pages + 1).model > free


def test_keys_of_a_model_in_bf16_are_bf16_on_a_device() -> None:
    kinds = [whole_budget("8B", type_, 8192, device).kv_type for type_, device in product(TYPES, ("cuda", "cpu"))]
    assert kinds == ["f16", "f16", "bf16", "f16"]


def test_two_cards_divide_weights_and_pages_but_not_their_workspaces() -> None:
    one, free = whole_budget("8B", "BF16", 8192), available(12)
    two = replace(one, num_devices=2)
    assert one.with_step_that_fits(free).model > free
    found = two.with_step_that_fits(2 * free)
    assert found.model <= 2 * free
    assert found.workspace == 2 * (sum(found.buffers) + found.history)
    assert found.buffers[0] <= free / 8
    assert found.history <= free / 32


def test_a_host_has_pages_for_at_most_eight_contexts() -> None:
    budget = whole_budget("8B", "Q4_K", 8192, device="cpu")
    assert loaded(budget).planned(10**12).pool_pages == 8 * 128
    assert (budget.history, sum(loaded(budget).buffers)) == (8 * (128_256 + 8192), 64 * 4 * 128_256)


def test_a_device_has_the_history_of_all_rows_and_the_workspace_twice() -> None:
    budget = whole_budget("8B", "Q4_K", 8192)
    assert budget.history == 512 * (8 * 128_256 + 4 * 8192)
    buffers = budget.buffers[0]
    small = replace(budget, load=replace(budget.load, limits=GPU_STEP._replace(tokens=1024)))
    assert 2 * 0.3e6 * 8192 < buffers < 2 * 0.4e6 * 8192
    assert buffers > 7 * small.buffers[0]
