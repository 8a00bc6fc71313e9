"""The forward pass against `transformers` on tiny random weights: every family, with steps of every kind.

Greedy answers through `LLM` are its argmax, and the text part of multimodal models has its logits.
"""

import copy
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from huggingface_hub.errors import StrictDataclassFieldValidationError
from torch import Tensor

from byte_tokenizer import VOCAB_SIZE, write_byte_tokenizer
from extent import IS_WHOLE
from infer import LLM, SamplingParams
from infer.compute import ops
from infer.compute.backends.cpu.capture.forward import CapturedForward
from infer.compute.kvcache.paged import PagedCache
from infer.compute.operands.step import Step
from infer.engine.runner.runner import make_cache
from infer.models.transformer import Transformer
from path_cases import Always
from steps import join, load_network, logits_of
from tiny import BY_NAME, ONE_EACH, TINY, Tiny, make_tiny

# Settings that `make test` tries, besides a model of each family.
SHORT = {"llama_odd_sizes", "llama_yarn_mscale", "llama3_rope", "phi3_partial", "qwen2_windows", "gemma3_scaled"}
SHORT |= {"smollm3_windows", "gemma2_uncapped", "qwen3_moe_mixed", "qwen3_next_mixed", "llama4_chunks", "gemma4_moe"}
LENGTH = 100  # fills the windows several times over
TOLERANCE = 1e-4
# Some results of random delta nets are so small that their norms enlarge rounding: `transformers` in float64 is up to
# 8e-4 away from itself in float32, and as far from these kernels. Gemma 4 does not scale its scores: 1.9e-4.
TOLERANCES = dict.fromkeys(("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next", "olmo_hybrid"), 1e-3)
TOLERANCES |= dict.fromkeys(("gemma4_text", "gemma4_unified_text"), 4e-4)


Pair = tuple[Any, Transformer]


@pytest.fixture(scope="module")
def pairs() -> dict[str, Pair]:
    """Return the pairs, each made once. Pytest would make a fixture with parameters again after another parameter."""
    return {}


@pytest.fixture(params=TINY, ids=lambda tiny: tiny.name)
def pair(request: pytest.FixtureRequest, pairs: dict[str, Pair], tmp_path: Path) -> Pair:
    tiny: Tiny = request.param
    if tiny.name not in pairs:
        pairs[tiny.name] = make_tiny(tiny, tmp_path), load(tmp_path)
    return pairs[tiny.name]


def load(folder: Path) -> Transformer:
    return load_network(folder, dtype=torch.float32)


def tolerance_of(oracle: Any) -> float:
    return TOLERANCES.get(oracle.config.model_type, TOLERANCE)


def random_ids(length: int, seed: int = 0) -> list[int]:
    return torch.randint(3, 96, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


@torch.inference_mode()
def expected_logits(oracle: Any, token_ids: Sequence[int]) -> Tensor:
    logits: Tensor = oracle(torch.tensor([token_ids])).logits[0]
    return logits


def make_reserved(model: Transformer, num_rows: int = 1) -> PagedCache:
    """Return a cache whose rows have room for the tokens of every test."""
    cache = make_cache(model, LENGTH, num_rows, step_tokens=LENGTH)
    for row in range(num_rows):
        cache.reserve(row, LENGTH)
    return cache


@torch.inference_mode()
def chunked_logits(model: Transformer, token_ids: Sequence[int], chunk: int) -> Tensor:
    """Return the logits of a recording, which is replayed for every chunk."""
    cache = make_reserved(model)
    captured = CapturedForward(lambda step: model.forward(step, cache), LENGTH, LENGTH)
    pieces = []
    for start in range(0, len(token_ids), chunk):
        ids = token_ids[start : start + chunk]
        pieces.append(captured.run(Step.of(ids, start, logit_indices=range(len(ids)))).clone())
        cache.commit(0, len(ids))
    return torch.cat(pieces)


def chunk_cases() -> Iterator[Any]:
    """Return every size of chunks for one model of each family, and two sizes for each setting."""
    for tiny in TINY:
        for chunk in (LENGTH, 1, 7, 16, 64) if IS_WHOLE or tiny in ONE_EACH else (LENGTH, 7):
            marks = [] if chunk == 7 and (tiny in ONE_EACH or tiny.name in SHORT) else [pytest.mark.slow]
            yield pytest.param(tiny, chunk, id=f"{tiny.name}-{chunk}", marks=marks)


@pytest.mark.parametrize(("pair", "chunk"), list(chunk_cases()), indirect=["pair"])
def test_logits_equal_transformers_at_every_position_for_any_chunk(pair: Pair, chunk: int) -> None:
    oracle, model = pair
    token_ids = random_ids(LENGTH)
    logits = chunked_logits(model, token_ids, chunk)
    expected = expected_logits(oracle, token_ids)
    assert (logits - expected).abs().max() <= tolerance_of(oracle)
    wanted, found = expected.double().log_softmax(-1), logits.double().log_softmax(-1)
    assert (wanted.exp() * (wanted - found)).sum(-1).mean() <= 0.1 * tolerance_of(oracle) ** 2  # mean KL


@pytest.mark.slow(cases=6, rest=40)
def test_ragged_rows_equal_single_rows(pair: Pair) -> None:
    oracle, model = pair
    prompts = [random_ids(length, seed=length) for length in (1, 33, 17, 50)]
    cache = make_reserved(model, len(prompts))
    done = [0] * len(prompts)
    collected: list[list[Tensor]] = [[] for _ in prompts]
    while any(start < len(ids) for start, ids in zip(done, prompts, strict=True)):
        ends = [min(start + 9 + 4 * row, len(prompts[row])) for row, start in enumerate(done)]
        parts = [(row, ids[done[row] : ends[row]]) for row, ids in enumerate(prompts)]
        steps = [Step.of(ids, done[row], row=row, logit_indices=range(len(ids))) for row, ids in parts if ids]
        with torch.inference_mode():
            logits = model.forward(join(steps), cache)
        for row, part in enumerate(logits.split([len(ids) for _, ids in parts])):
            cache.commit(row, len(part))
            collected[row].append(part)
            done[row] += len(part)
    for parts, ids in zip(collected, prompts, strict=True):
        assert (torch.cat(parts) - expected_logits(oracle, ids)).abs().max() <= tolerance_of(oracle)


@pytest.mark.slow(cases=3)
def test_only_wanted_logits_are_computed(pair: Pair) -> None:
    oracle, model = pair
    token_ids = random_ids(20)
    with torch.inference_mode():
        logits = model.forward(Step.of(token_ids, logit_indices=[3, 19, 4]), make_reserved(model))
    assert (logits - expected_logits(oracle, token_ids)[[3, 19, 4]]).abs().max() <= tolerance_of(oracle)


@pytest.mark.slow(cases=6)
@torch.inference_mode()
def test_hidden_states_equal_transformers_after_the_last_norm(pair: Pair) -> None:
    oracle, model = pair
    token_ids = random_ids(LENGTH)
    # In infer, it is a part of the norm's weights.
    names = ("output_multiplier", "logit_scale")
    scale = getattr(oracle.config, "logits_scaling", 1.0)
    scale = (1 / scale if oracle.config.model_type == "hyperclovax" else scale) / prod(
        getattr(oracle.config, name, 1.0) for name in names
    )
    expected = oracle.base_model(torch.tensor([token_ids])).last_hidden_state[0] / scale
    found = ops.normalize(model.residual(Step.of(token_ids), make_reserved(model)), model.norm)
    assert (found - expected).abs().max() <= tolerance_of(oracle)


@pytest.mark.slow(cases=8, rest=40)
def test_uncommitted_tokens_leave_no_trace(pair: Pair) -> None:
    _, model = pair
    token_ids, drafts = random_ids(40), random_ids(12, seed=9)
    plain, drafted = make_reserved(model), make_reserved(model)
    with torch.inference_mode():
        model.forward(Step.of(token_ids), plain)
        model.forward(Step.of(token_ids), drafted)
        plain.commit(0, 40)
        drafted.commit(0, 40)
        model.forward(Step.of(drafts, 40), drafted)
        drafted.commit(0, 0)
        ids = random_ids(5, seed=3)
        after_plain = model.forward(Step.of(ids, 40, logit_indices=range(5)), plain)
        after_drafted = model.forward(Step.of(ids, 40, logit_indices=range(5)), drafted)
    assert torch.equal(after_plain, after_drafted)


@pytest.mark.slow(cases=3, rest=20)
@pytest.mark.parametrize("tiny", ONE_EACH, ids=lambda tiny: tiny.name)
def test_greedy_is_the_argmax_of_transformers(tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = copy.deepcopy(tiny.config)
    config.vocab_size, config.eos_token_id = VOCAB_SIZE, 256
    with suppress(StrictDataclassFieldValidationError):  # of a config that must have a first token
        config.bos_token_id = None
    oracle = make_tiny(replace(tiny, config=config), tmp_path)
    write_byte_tokenizer(tmp_path)
    llm = LLM(tmp_path, dtype="float32")
    monkeypatch.setattr("infer.engine.step.drafting.DraftPolicy", lambda most, priors: Always())
    params = SamplingParams(temperature=0, max_new_tokens=40, ignore_eos=True)
    prompts = ["abcabcabcab", "a", "to be or not to be or not"]
    results = [llm.generate(prompt, params, speculation="ngram") for prompt in prompts]
    for prompt, result in zip(prompts, results, strict=True):
        prompt_ids = llm.tokenizer.encode(prompt)
        with torch.inference_mode():
            logits = oracle(torch.tensor([prompt_ids + result.token_ids])).logits[0]
        # Greedy decoding samples the likeliest token after each prefix, which one pass over the whole text shows.
        assert result.token_ids == logits[len(prompt_ids) - 1 : -1].argmax(-1).tolist()
    assert sum(result.stats.drafts_proposed for result in results) > 0
    together = llm.generate_all(prompts, params, batch_size=2, speculation="ngram")
    assert [result.token_ids for result in together] == [result.token_ids for result in results]


SMALL = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
GEMMA3_TEXT = hf.Gemma3TextConfig(
    vocab_size=96, hidden_size=64, intermediate_size=96, num_hidden_layers=4, num_attention_heads=4,
    num_key_value_heads=2, head_dim=16, max_position_embeddings=256, sliding_window=8, sliding_window_pattern=2,
    pad_token_id=0,
)  # fmt: skip


def text_config(name: str) -> Any:
    return BY_NAME[name].config.to_dict()


def gemma4(name: str) -> tuple[Any, Any, float]:
    vision = SMALL | {"num_key_value_heads": 2, "head_dim": 16}
    ids = {"image_token_id": 90, "boi_token_id": 91, "eoi_token_id": 92, "audio_token_id": 93}
    config = hf.Gemma4Config(text_config=text_config(name), vision_config=vision, audio_config=None, **ids)
    return hf.Gemma4ForConditionalGeneration, config, 4e-4


LLAMA4_VISION = SMALL | {"vision_output_dim": 32, "projector_input_dim": 32, "projector_output_dim": 32}
LLAMA4_VISION |= {"image_size": 28}
QWEN_VISION = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 64}
MODELS: dict[str, tuple[Any, Any, float]] = {  # a class of `transformers`, its config, and the tolerance of logits
    "gemma3": (
        hf.Gemma3ForConditionalGeneration,
        hf.Gemma3Config(
            text_config=GEMMA3_TEXT, vision_config=hf.SiglipVisionConfig(**SMALL, image_size=8, patch_size=4),
            mm_tokens_per_image=4, image_token_index=90, boi_token_index=91,
        ),
        1e-4,
    ),
    "gemma4_per_layer": gemma4("gemma4_per_layer"),
    "gemma4_moe": gemma4("gemma4_moe"),
    "llama4_chunks": (
        hf.Llama4ForConditionalGeneration,
        hf.Llama4Config(text_config=text_config("llama4_chunks"), vision_config=LLAMA4_VISION, image_token_index=90),
        1e-4,
    ),
    "qwen3_5": (
        hf.Qwen3_5ForConditionalGeneration,
        hf.Qwen3_5Config(
            text_config=text_config("qwen3_5"), vision_config=QWEN_VISION, image_token_id=90, video_token_id=91,
            vision_start_token_id=92, vision_end_token_id=93,
        ),
        1e-3,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_the_text_of_a_multimodal_model_is_that_of_transformers(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    made, config, most = MODELS[name]
    oracle = made._from_config(config, attn_implementation="eager").float().eval()
    oracle.save_pretrained(tmp_path)
    if name.startswith("gemma4"):
        oracle.model.language_model.config.output_hidden_states = True  # `tiny.make_tiny` has the reason
    token_ids = torch.randint(3, 90, (100,)).tolist()
    expected = expected_logits(oracle.language_model if name.startswith("llama4") else oracle, token_ids)
    assert (logits_of(load(tmp_path), token_ids) - expected).abs().max() <= most
