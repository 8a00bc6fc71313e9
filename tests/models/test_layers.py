"""Parts of layers: halves of layers, gates and scaled queries of attention, and experts, which a file may lack."""

import json
from collections.abc import Mapping
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
from infer.compute.kvcache.cache_settings import CacheSettings
from infer.compute.operands.activation_values import Activations
from infer.compute.operands.architecture import Architecture, check_unusual_parts
from infer.compute.operands.feed_forwards import Dense, Experts, Router
from infer.compute.operands.step import Chunk, Step
from infer.compute.operands.weights import FileWeight, Heads, StoredWeight
from infer.compute.quantization.ggml_blocks import dequantize
from infer.compute.quantization.quantisers import quantise
from infer.engine.runner.runner import Runner, make_cache
from infer.engine.tensor_parallel.ranks import start_ranks
from infer.errors import InvalidRequestError, ModelError, UnsupportedModelError
from infer.files import open_checkpoint
from infer.files.tensors.lazy_weights import LazyWeights
from infer.model_settings import ModelSettings
from infer.models.families import make_architecture
from infer.models.from_checkpoint import load_tokenizer
from infer.models.load import load_transformer
from infer.models.memory.memory_estimate import LoadSettings, loaded_types
from infer.models.sharding import check_experts
from infer.models.transformer import Transformer
from infer.models.weight_loader import dense
from layer_caches import make_layer
from quantised_folders import set_config
from refusals import check_refused
from steps import load_network
from tiny import BY_NAME, GATED, MINISTRAL3, Tiny, change_tensors, make_tiny

CPU = torch.device("cpu")
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
    return load_transformer(architecture, weights, backend=ops.backend_of(CPU))


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
    (
        BY_NAME["phi"],
        "LayerNorm, attention in parallel to the MLP, feed-forwards without a gate",
        "mlp beside attention",
    ),
    (BY_NAME["apertus"], "feed-forwards without a gate, xIELU", "mlp 96, xielu"),
    (
        BY_NAME["stablelm_norms"],
        "LayerNorm, attention in parallel to the MLP, norms of q and k that subtract the mean",
        "q and k norms (head centred)",
    ),
    (BY_NAME["hunyuan_v1_dense"], "norms of q and k after their rotation", "q and k norms (head after)"),
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
    CudaBackend(CPU).check_layers(architecture.layers)
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
        runner.cache.reserve(0, 1)
        found.append(runner.forward([Chunk(0, [5])]).clone())
    assert all(torch.equal(each, found[0]) for each in found)
    whole = Runner(model, 200)
    whole.extend(0, prompt)
    whole.cache.reserve(0, 1)
    assert not torch.equal(whole.forward([Chunk(0, [5])]), found[0])


# Models with experts


NUM_EXPERTS = 4


def cut(architecture: Architecture, weights: Mapping[str, FileWeight]) -> tuple[Architecture, dict[str, FileWeight]]:
    """Return SmolLM2 with each MLP divided into four experts, which all tokens choose with weights of 1."""
    layers, found = [], dict[str, FileWeight]()
    for index, layer in enumerate(architecture.layers):
        assert isinstance(layer.feed_forward, Dense)
        size = layer.feed_forward.intermediate_size // NUM_EXPERTS
        router = Router(NUM_EXPERTS, NUM_EXPERTS, "softmax", scale=float(NUM_EXPERTS))  # equal logits: each weight is 1
        layers.append(replace(layer, feed_forward=Experts(router, size, layer.feed_forward.activation)))
        at = f"model.layers.{index}.mlp."
        found[f"{at}router.weight"] = stored(torch.zeros(NUM_EXPERTS, architecture.hidden_size))
        for which in ("gate", "up", "down"):
            whole = dense(weights[f"{at}{which}_proj.weight"].rows(0, weights[f"{at}{which}_proj.weight"].shape[0]))
            parts = whole.float().split(size, dim=1 if which == "down" else 0)
            found |= {f"{at}experts.{each}.{which}_proj.weight": stored(part) for each, part in enumerate(parts)}
    found |= {name: weight for name, weight in weights.items() if ".mlp." not in name}
    return replace(architecture, layers=tuple(layers)), found


def stored(values: Tensor) -> StoredWeight:
    return StoredWeight("F32", tuple(values.shape), values.contiguous())


def greedy(model: Transformer, token_ids: list[int], count: int) -> list[int]:
    cache, found, next_ids = make_cache(model, 128), list[int](), token_ids
    with torch.inference_mode():
        for _ in range(count):
            start = cache.lengths[0]
            cache.reserve(0, len(next_ids))
            logits = model.forward(Step.of(next_ids, start), cache)
            cache.commit(0, len(next_ids))
            next_ids = [int(logits[-1].argmax())]
            found += next_ids
    return found


@pytest.mark.parametrize(
    ("kept", "num_layers"),
    [("auto", 4), *(pytest.param(kept, 30, marks=pytest.mark.slow(rest=1)) for kept in ("q8", "q4"))],
)
def test_smollm2_divided_into_experts_answers_as_smollm2(kept: str, num_layers: int) -> None:
    """Few layers of SmolLM2 are a model, too."""
    checkpoint = open_checkpoint("smollm2")
    whole, weights = make_architecture(checkpoint.config), LazyWeights(checkpoint.tensors)
    unused = tuple(f"model.layers.{layer}." for layer in range(num_layers, len(whole.layers)))
    whole = replace(whole, layers=whole.layers[:num_layers])
    weights = {name: weight for name, weight in weights.items() if not name.startswith(unused)}
    architecture, divided = cut(whole, weights)
    model = load_transformer(architecture, divided, backend=ops.backend_of(CPU), keep_floats_as=kept, max_seq_len=128)
    expected = load_transformer(whole, weights, backend=ops.backend_of(CPU), max_seq_len=128)
    prompt, count = load_tokenizer(checkpoint).encode("The capital of France is"), 12 if kept != "q4" else 1
    assert greedy(model, prompt, count) == greedy(expected, prompt, count)


def make_folder(folder: Path, name: str = "qwen3_moe") -> dict[str, Any]:
    make_tiny(BY_NAME[name], folder)
    return json.loads((folder / "config.json").read_text())


def test_a_missing_expert_is_named(tmp_path: Path) -> None:
    make_folder(tmp_path)
    change_tensors(tmp_path, lambda tensors: tensors.pop("model.layers.1.mlp.experts.7.up_proj.weight"))
    with pytest.raises(ModelError, match=r"missing model\.layers\.1\.mlp\.experts\.7\.up_proj\.weight"):
        load_network(tmp_path)


def test_more_chosen_experts_than_there_are_are_refused(tmp_path: Path) -> None:
    make_folder(tmp_path)
    set_config(tmp_path, "num_experts_per_tok", 21)
    check_refused(lambda: load_network(tmp_path), r"num_experts_per_tok must be at most .*20, got 21", ModelError)


def test_stacked_experts_of_another_shape_are_refused(tmp_path: Path) -> None:
    make_folder(tmp_path, "granitemoe")
    name = "model.layers.0.block_sparse_moe.input_linear.weight"
    for part, problem in ((slice(4), "missing .*experts.4"), (0, "experts, rows and columns")):
        change_tensors(tmp_path, lambda own, part=part: own.update({name: own[name][part].contiguous()}))
        with pytest.raises(ModelError, match=problem):
            load_network(tmp_path)


def test_stacks_of_too_many_experts_are_refused_before_they_are_split(tmp_path: Path) -> None:
    make_folder(tmp_path, "granitemoe")
    wrong = {"model.layers.0.block_sparse_moe.output_linear.weight": torch.zeros(4097, 1, 1)}
    change_tensors(tmp_path, lambda tensors: tensors.update(wrong))
    check_refused(lambda: load_network(tmp_path), "expected at most 4096 experts, got 4097", ModelError)


def test_layers_that_only_draft_tokens_are_left_out(tmp_path: Path) -> None:
    config, drafting = make_folder(tmp_path, "glm4_moe"), torch.zeros(64, 128)
    assert config["num_nextn_predict_layers"] == 1
    change_tensors(tmp_path, lambda tensors: tensors.update({"model.layers.3.eh_proj.weight": drafting}))
    assert len(load_network(tmp_path).layers) == 3
    change_tensors(tmp_path, lambda tensors: tensors.update({"model.layers.4.eh_proj.weight": drafting}))
    check_refused(lambda: load_network(tmp_path), r"unexpected 'model\.layers\.4\.eh_proj\.weight", ModelError)


def test_a_device_without_a_part_names_it_in_its_refusal() -> None:
    for name, part in (("deepseek_v3", "latent attention"), ("granitemoehybrid", "the state-space layers of Mamba2")):
        with pytest.raises(UnsupportedModelError, match=f"model_type '{name}' is not supported: it needs {part}"):
            make_architecture({"model_type": name})


def test_dense_layers_are_those_that_the_config_lists(tmp_path: Path) -> None:
    config = make_folder(tmp_path, "qwen3_moe_mixed")
    found = [type(layer.feed_forward) for layer in make_architecture(config).layers]
    assert found == [Experts, Dense, Experts]
    with pytest.raises(ModelError, match=r"mlp_only_layers must list the numbers of layers, got 'one'"):
        make_architecture(config | {"mlp_only_layers": "one"})


def test_too_many_ranks_refuse_experts_in_a_line(tmp_path: Path) -> None:
    make_folder(tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    architecture = make_architecture(checkpoint.config)
    check_experts(architecture, 4)
    with pytest.raises(InvalidRequestError, match=r"tensor_parallel=5 gives .* expert's 64 rows: use at most 4$"):
        start_ranks(checkpoint, ModelSettings(tensor_parallel=5))


def test_biases_that_cohere_does_not_read_are_left_out(tmp_path: Path) -> None:
    make_tiny(BY_NAME["cohere2"], tmp_path)
    before = logits_of(load_network(tmp_path), is_recorded=False)
    names = ("model.layers.0.input_layernorm.bias", "model.layers.0.self_attn.q_proj.bias", "model.norm.bias")
    change_tensors(tmp_path, lambda tensors: tensors.update({name: torch.zeros(64) for name in names}))
    assert torch.equal(logits_of(load_network(tmp_path), is_recorded=False), before)


def test_experts_of_several_types_are_loaded_as_one_in_which_all_values_fit(tmp_path: Path) -> None:
    make_tiny(BY_NAME["qwen3_moe_odd"], tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    architecture, weights = make_architecture(checkpoint.config), dict(LazyWeights(checkpoint.tensors))
    mixed, same = dict(weights), dict(weights)
    name = "model.layers.1.mlp.experts.2.up_proj.weight"
    values = dequantize(quantise(weights[name].data, "Q8_0"), "Q8_0").reshape(weights[name].shape)
    mixed[name] = StoredWeight("Q8_0", weights[name].shape, quantise(weights[name].data, "Q8_0"))
    same[name] = StoredWeight("F32", weights[name].shape, values)
    found = [logits_of(load(architecture, each), is_recorded=False) for each in (mixed, same, weights)]
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])
    types = loaded_types(architecture, mixed, LoadSettings())
    assert {types[name.replace("experts.2", f"experts.{expert}")] for expert in range(6)} == {"F32"}
