"""Encoders against `transformers` on tiny random weights: every family, long texts, many texts, pairs."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from encoder_models import (
    BY_NAME,
    CONTEXT,
    ENCODERS,
    WITHOUT_MASK,
    Encoder,
    config_of,
    make_encoder,
    states_of,
    with_fused_qkv,
)
from extent import IS_SHORT
from infer.compute import ops
from infer.compute.backends.before_load import StepSizes
from infer.compute.backends.cpu.workspace import step_buffers
from infer.compute.backends.torch_backend import TorchBackend
from infer.compute.kvcache.cache_settings import CacheSettings
from infer.compute.kvcache.groups import text_cache_bytes
from infer.compute.operands.architecture import check_unusual_parts
from infer.compute.operands.limits import HOST_STEP, MAX_STEP_TEXTS
from infer.engine.runner.hidden_states import TextEncoder
from infer.errors import InferError, ModelError, UnsupportedModelError
from infer.files import open_checkpoint
from infer.files.tensors.lazy_weights import LazyWeights
from infer.models.families import make_architecture
from infer.models.load import load_transformer
from infer.models.memory.memory_budget import MemoryBudget
from infer.models.memory.memory_estimate import LoadSettings, loaded_types
from refusals import check_refused

TOLERANCE = 1e-4
LENGTHS = (1, 65, 650) if IS_SHORT else (1, 2, 17, 63, 64, 65, 256, 257, 513, CONTEXT)
CPU = ops.backend_of(torch.device("cpu"))


def load(folder: Path, backend: ops.Backend = CPU, *, capture: bool = True, **settings: Any) -> TextEncoder:
    checkpoint = open_checkpoint(folder)
    architecture, weights = make_architecture(checkpoint.config), LazyWeights(checkpoint.tensors)
    return TextEncoder(load_transformer(architecture, weights, backend=backend, **settings), "auto", capture=capture)


def encoded(encoder: TextEncoder, texts: list[list[int]], second_starts: list[int] | None = None) -> list[Tensor]:
    """Return the states of each text."""
    parts: list[list[Tensor]] = [[] for _ in texts]
    with CPU.threads(), torch.inference_mode():
        for step in encoder.of(texts, second_starts or [len(text) for text in texts]):
            for text, states in step:
                parts[text].append(states)
    return [torch.cat(own) for own in parts]


def some_ids(count: int, seed: int = 0) -> list[int]:
    found: list[int] = torch.randint(4, 300, (count,), generator=torch.Generator().manual_seed(seed + count)).tolist()
    return found


Pair = tuple[Any, TextEncoder]


@pytest.fixture(scope="module")
def pairs() -> dict[str, Pair]:
    return {}


OTHER_FORMS = ("bert-odd", "xlm-roberta", "modernbert-biased")
SHORT = ("bert", "modernbert", "embedding-gemma", "qwen2-windows", "granite")  # of `make test`
PAIRS = [
    pytest.param(each, id=each.name, marks=[] if each.name in SHORT else pytest.mark.slow)
    for each in (*ENCODERS, *WITHOUT_MASK)
]


@pytest.fixture(params=PAIRS)
def pair(request: pytest.FixtureRequest, pairs: dict[str, Pair], tmp_path: Path) -> Pair:
    encoder: Encoder = request.param
    if encoder.name not in pairs:
        pairs[encoder.name] = make_encoder(encoder, tmp_path), load(tmp_path)
    return pairs[encoder.name]


def test_the_states_of_all_tokens_are_those_of_transformers(pair: Pair) -> None:
    model, encoder = pair
    for length in LENGTHS:
        ids = some_ids(length)
        (found,) = encoded(encoder, [ids])
        assert found.shape == (length, model.config.hidden_size)
        torch.testing.assert_close(found, states_of(model, ids), rtol=0, atol=TOLERANCE, msg=f"{length} tokens")


def test_a_text_has_the_same_bits_whatever_its_neighbours(pair: Pair) -> None:
    encoder = pair[1]
    texts = [some_ids(length) for length in (3, 1, 40, 200, 64, 130, 2)]
    for order in (texts, texts[::-1]):
        for text, found in zip(order, encoded(encoder, order), strict=True):
            assert torch.equal(encoded(encoder, [text])[0], found)


def test_a_long_text_changes_nothing_for_the_next(pair: Pair) -> None:
    encoder, ids = pair[1], some_ids(30)
    before = encoded(encoder, [ids])[0]
    encoded(encoder, [some_ids(900)])
    assert torch.equal(encoded(encoder, [ids])[0], before)


@pytest.mark.parametrize("name", ["bert", "bert-relu", "nomic"])
@pytest.mark.parametrize("second_start", [0, 1, 25, 39])
def test_the_second_text_of_a_pair_has_a_type_of_its_own(name: str, second_start: int, tmp_path: Path) -> None:
    model, ids = make_encoder(BY_NAME[name], tmp_path), some_ids(40)
    encoder = load(tmp_path)
    (found,) = encoded(encoder, [ids], [second_start])
    torch.testing.assert_close(found, states_of(model, ids, second_start), rtol=0, atol=TOLERANCE)
    assert not torch.equal(found, encoded(encoder, [ids])[0])


def test_a_model_with_one_type_gives_it_to_both_texts(tmp_path: Path) -> None:
    model, encoder, ids = make_encoder(BY_NAME["roberta"], tmp_path), load(tmp_path), some_ids(40)
    (found,) = encoded(encoder, [ids], [20])
    assert torch.equal(found, encoded(encoder, [ids])[0])
    torch.testing.assert_close(found, states_of(model, ids), rtol=0, atol=TOLERANCE)


@pytest.mark.slow(cases=3)
@pytest.mark.parametrize("name", [*OTHER_FORMS, "nomic", "embedding-gemma", "qwen2-windows"])
@pytest.mark.parametrize("length", [5, 700])
def test_plain_torch_agrees(name: str, length: int, tmp_path: Path) -> None:
    model, ids = make_encoder(BY_NAME[name], tmp_path), some_ids(length)
    (found,) = encoded(load(tmp_path, TorchBackend(torch.device("cpu"))), [ids])
    torch.testing.assert_close(found, states_of(model, ids), rtol=0, atol=TOLERANCE)


@pytest.mark.slow(cases=2)
@pytest.mark.parametrize("name", ["bert", "modernbert", "embedding-gemma"])
@pytest.mark.parametrize("length", [50, 700])
def test_ops_one_by_one_give_the_bits_of_the_recording(name: str, length: int, tmp_path: Path) -> None:
    make_encoder(BY_NAME[name], tmp_path)
    ids = some_ids(length)
    assert torch.equal(encoded(load(tmp_path, capture=False), [ids])[0], encoded(load(tmp_path), [ids])[0])


@pytest.mark.slow
@pytest.mark.parametrize(("weights", "precision", "least"), [("q8", "exact", 0.999), ("q8", "fast", 0.998)])
def test_quantised_weights_keep_the_direction(weights: Any, precision: Any, least: float, tmp_path: Path) -> None:
    model, ids = make_encoder(BY_NAME["bert"], tmp_path), some_ids(300)
    (found,) = encoded(load(tmp_path, keep_floats_as=weights, precision=precision), [ids])
    assert torch.cosine_similarity(found.mean(0), states_of(model, ids).mean(0), dim=0) > least


def test_the_number_of_threads_changes_no_bit(tmp_path: Path) -> None:
    make_encoder(BY_NAME["modernbert"], tmp_path)
    texts, encoder, num_threads = [some_ids(300), some_ids(21)], load(tmp_path), CPU.num_threads()
    before = encoded(encoder, texts)
    try:
        ops.set_num_threads(1 if num_threads > 1 else 2)
        assert all(map(torch.equal, encoded(encoder, texts), before))
    finally:
        ops.set_num_threads(num_threads)


@pytest.mark.parametrize("name", ["modernbert", "embedding-gemma"])
def test_poisoned_memory_is_never_read(name: str, tmp_path: Path) -> None:
    make_encoder(BY_NAME[name], tmp_path)
    encoder, ids = load(tmp_path), some_ids(45)
    before = encoded(encoder, [ids])[0]
    for layer in encoder._cache.layers:
        layer.keys.view(torch.float32).fill_(torch.nan)
        layer.values.view(torch.float32).fill_(torch.nan)
    assert torch.equal(encoded(encoder, [ids])[0], before)


def test_the_names_of_published_files_load(tmp_path: Path) -> None:
    """Nomic's own files have fused projections and older names; some of BERT's have a prefix and gamma and beta.

    DistilBERT and ELECTRA have a prefix, and heads that predict words.
    """
    of_distilbert = partial(_with_guesses, prefix="distilbert", heads=("vocab_transform", "vocab_projector"))
    of_electra = partial(_with_guesses, prefix="electra", heads=("discriminator_predictions", "generator_lm_head"))
    renames = {"nomic": _published_nomic, "bert": _published_bert, "distilbert": of_distilbert, "electra": of_electra}
    for name, rename in renames.items():
        folder = tmp_path / name
        make_encoder(BY_NAME[name], folder)
        ids = some_ids(50)
        before = encoded(load(folder), [ids])[0]
        path = folder / "model.safetensors"
        save_file(rename(load_file(path)), path)
        assert torch.equal(encoded(load(folder), [ids])[0], before)


_OLDER_NAMES = {"self_attn.o_proj": "attn.out_proj", "mlp.up_proj": "mlp.fc11", "mlp.gate_proj": "mlp.fc12"}
_OLDER_NAMES |= {"mlp.down_proj": "mlp.fc2", "post_attention_layernorm": "norm1", "post_mlp_layernorm": "norm2"}
_OLDER_NAMES |= {"embeddings.LayerNorm": "emb_ln"}


def _published_nomic(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    found = {}
    for name, tensor in with_fused_qkv(tensors).items():
        for theirs, ours in _OLDER_NAMES.items():
            name = name.replace(theirs, ours)
        found[f"encoder.{name}" if name.startswith("layers.") else name] = tensor.contiguous()
    return found


def _published_bert(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    found = {"cls.predictions.bias": torch.zeros(300), "bert.embeddings.position_ids": torch.arange(4)[None].float()}
    for name, tensor in tensors.items():
        own = name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta")
        found[f"bert.{own}"] = tensor
    return found


def _with_guesses(tensors: dict[str, Tensor], prefix: str, heads: tuple[str, ...]) -> dict[str, Tensor]:
    guesses = {f"{head}.weight": torch.zeros(300, 96) for head in heads}
    return {f"{prefix}.{name}": tensor for name, tensor in tensors.items()} | guesses


def test_a_class_without_a_mask_needs_no_setting(tmp_path: Path) -> None:
    model, ids = make_encoder(BY_NAME["llama"], tmp_path), some_ids(70)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config.pop("is_causal") is False
    config |= {"model_type": "llama_bidirec", "architectures": ["LlamaBidirectionalModel"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (found,) = encoded(load(tmp_path), [ids])
    torch.testing.assert_close(found, states_of(model, ids), rtol=0, atol=TOLERANCE)


def test_a_head_for_tokens_is_not_needed_and_not_loaded(tmp_path: Path) -> None:
    make_encoder(BY_NAME["qwen2"], tmp_path)
    ids, path = some_ids(20), tmp_path / "model.safetensors"
    before = encoded(load(tmp_path), [ids])[0]
    assert json.loads((tmp_path / "config.json").read_text())["tie_word_embeddings"] is False
    save_file(load_file(path) | {"lm_head.weight": torch.full((300, 96), torch.nan)}, path)
    assert torch.equal(encoded(load(tmp_path), [ids])[0], before)


def test_more_tokens_than_there_is_room_for_are_refused(tmp_path: Path) -> None:
    make_encoder(BY_NAME["bert"], tmp_path)
    encoder = load(tmp_path, max_seq_len=80)
    check_refused(lambda: encoded(encoder, [some_ids(700)]), "no room for texts of 700")
    check_refused(lambda: encoded(encoder, [some_ids(300), some_ids(300)]), "512 tokens together, got 600")


NOT_COMPUTED = [
    ("bert", {"position_embedding_type": "relative_key"}, "position_embedding_type='relative_key'"),
    ("bert", {"is_decoder": True}, "is_decoder"),
    ("bert", {"hidden_act": "mish"}, "hidden_act 'mish'"),
    ("bert", {"num_attention_heads": 5}, "multiple of num_attention_heads=5"),
    ("electra", {"embedding_size": 64}, "embedding_size=64.* must be hidden_size, 96"),
    ("roberta", {"pad_token_id": 0}, "pad_token_id=0"),
    ("roberta", {"max_position_embeddings": 2}, "must be more than 2, got 2"),
    ("nomic", {"prenorm": True}, "prenorm=True"),
    ("nomic", {"rotary_scaling_factor": 2.0}, "rotary_scaling_factor"),
    ("modernbert", {"layer_types": ["full_attention"]}, "layer_types"),
    ("modernbert", {"layer_types": ["chunked_attention"] * 4}, "layer type 'chunked_attention' is not supported"),
]


@pytest.mark.parametrize(("name", "settings", "problem"), NOT_COMPUTED)
def test_settings_that_are_not_computed_are_refused(name: str, settings: dict[str, Any], problem: str) -> None:
    with pytest.raises((ModelError, UnsupportedModelError), match=problem):
        make_architecture(config_of(BY_NAME[name]).to_dict() | settings)


def test_gpus_refuse_encoders_in_one_line() -> None:
    with pytest.raises(InferError, match=r"no kernels for .*attention without a mask.*: use device cpu"):
        check_unusual_parts(make_architecture(config_of(BY_NAME["bert"]).to_dict()).layers, "cuda")


@pytest.mark.parametrize("name", ["modernbert", "embedding-gemma"])
def test_the_estimate_is_the_allocated_memory(name: str, tmp_path: Path) -> None:
    make_encoder(BY_NAME[name], tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    architecture, encoder = make_architecture(checkpoint.config), load(tmp_path)
    tensors = [tensor for layer in encoder._cache.layers for tensor in (layer.keys, layer.values)]
    memory = {tensor.data_ptr(): tensor.numel() for tensor in tensors}
    budget = MemoryBudget.of(architecture, checkpoint.tensors, LoadSettings(), CacheSettings(), num_tokens=CONTEXT)
    assert budget.cache == sum(memory.values())
    assert budget.cache == text_cache_bytes(architecture.attention[0], MAX_STEP_TEXTS, CONTEXT, "f32")
    buffers = encoder._stages._recording._workspace  # type: ignore[attr-defined]
    fixed = {key: tensor for key, tensor in buffers.items() if "scratch" not in key[0] and "unpacked" not in key[0]}
    sizes = StepSizes(CONTEXT, HOST_STEP.tokens, 1, "exact", CPU.num_threads())
    expected = step_buffers(architecture, loaded_types(architecture, checkpoint.tensors, LoadSettings()), sizes, 1)
    counted = {key: size for key, size in expected.items() if "scratch" not in key[0] and "unpacked" not in key[0]}
    assert sorted(counted) == sorted((key[0], tensor.numel() * tensor.element_size()) for key, tensor in fixed.items())
