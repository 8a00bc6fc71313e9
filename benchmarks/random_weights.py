"""Random weights of every type that infer multiplies with: a matrix, a model's few layers, and these as a GGUF file."""

import functools
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from infer.compute.operands.architecture import Architecture
from infer.compute.operands.feed_forwards import PER_LAYER_TABLE
from infer.compute.operands.mixers import Attention
from infer.compute.operands.weights import StoredWeight
from infer.compute.quantization.ggml_types import BLOCK_FIELDS, BLOCK_TYPES
from infer.files.gguf.forms import architecture_in_gguf, form_of
from infer.files.tensors.tensor_names import names_from_gguf
from infer.models.families import make_architecture
from infer.models.tensors import expected_shapes

MakeWeight = Callable[[str, int, int], StoredWeight]
_FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def make_weight(type_: str, rows: int, columns: int, seed: int = 0, scale: float = 0.01) -> StoredWeight:
    """Return random bits, with scales and minima between ± `scale`. The mean of Q4_K is zero, as in a model."""
    generator = torch.Generator().manual_seed(seed)
    if type_ in _FLOATS:
        return StoredWeight(type_, (rows, columns), torch.randn(rows, columns, generator=generator).to(_FLOATS[type_]))
    kind = BLOCK_TYPES[type_]
    blocks = torch.randint(0, 256, (rows * columns // kind.block_size, kind.block_bytes), generator=generator)
    blocks = blocks.to(torch.uint8)
    fields = BLOCK_FIELDS[type_]
    for at in (fields.scale_at, fields.minimum_at):
        if at is not None and fields.scale_form == "f16":
            halves = (torch.rand(len(blocks), 1, generator=generator) * 2 * scale - scale).half()
            blocks[:, at : at + 2] = halves.view(torch.uint8)
    if type_ == "Q4_K":  # a minimum is 7.5 times its scale: the middle of 0 to 15
        blocks[:, :2] = (blocks[:, 2:4].clone().view(torch.float16) / 7.5).view(torch.uint8)
        blocks[:, 8:12] = blocks[:, 4:8]
        blocks[:, 12:16] = blocks[:, 12:16] % 16 * 17
    if fields.scale_form == "exponent":
        blocks[:, 0] = blocks[:, 0] % 8 + 118
    if fields.scale_form == "UE4M3":
        blocks[:, :4] %= 16  # up to 0.015
    if fields.scale_form == "nibbles":
        blocks[:, fields.scale_at + 7] = blocks[:, fields.scale_at + 7] & 15 | 0x20  # less than 0.016
    if fields.scale_form == "f32":
        blocks[:, :4] = torch.full((len(blocks), 1), scale / 16).view(torch.uint8)
        blocks[:, 4:] &= 0xBF  # below 2
    data = blocks.reshape(rows, -1)
    if kind.tail_bytes:
        data = torch.cat((data, torch.ones(rows, 1).view(torch.uint8)), dim=1)
    return StoredWeight(type_, (rows, columns), data)


def make_tensor(name: str, shape: tuple[int, ...], type_: str, make: MakeWeight) -> StoredWeight:
    """Return random weights for a tensor of a model. Of matrices, those that are always floats are F32.

    Norms and scales are ones. Other vectors, which are biases, sinks and a state's decay, are zeros.
    """
    if len(shape) == 1:
        is_one = name.endswith(("norm.weight", "layer_scalar", "expert_scales"))
        return StoredWeight("F32", shape, torch.ones(shape) if is_one else torch.zeros(shape))
    return make("F32" if "router" in name or name.endswith("taps") else type_, *shape)


def random_layers(
    config: dict[str, Any], num_layers: int, type_: str, vocab_size: int, scale: float = 0.001
) -> tuple[Architecture, dict[str, StoredWeight]]:
    """Return the first layers of a model and their weights by name. Matrices of one shape share their random bits.

    The result of a layer is small compared with the embedding, so that tokens choose different experts. With many
    layers, that needs a smaller `scale`.
    """
    architecture = make_architecture(config)
    few = replace(architecture, layers=architecture.layers[:num_layers], vocab_size=vocab_size, tied_embeddings=True)
    make = functools.cache(make_weight)
    return few, {
        name: make_tensor(name, shape, type_, functools.partial(make, scale=0.01 if "embed" in name else scale))
        for name, shape in expected_shapes(few).items()
    }


def _meaningless_tokens(vocab_size: int) -> list[str]:
    letters = [chr(code) for code in (*range(33, 127), *range(161, 173), *range(174, 324))]  # GPT-2's for 256 bytes
    return [*letters, "to", *(f"token{index}" for index in range(len(letters) + 1, vocab_size))]


def write_folder(folder: Path, config: dict[str, Any]) -> None:
    """Write a model of this config with the random weights that `transformers` draws, in BF16, and a tokenizer."""
    from tokenizers import Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import BPE
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), dtype=torch.bfloat16)
    model.save_pretrained(folder)
    tokens = _meaningless_tokens(config["vocab_size"])
    tokenizer = Tokenizer(BPE({token: index for index, token in enumerate(tokens)}, [("t", "o")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))


def write_gguf(
    path: Path,
    config: dict[str, Any],
    num_layers: int,
    type_: str,
    vocab_size: int = 32_768,
    *,
    scale: float = 0.001,
    favour: float = 0.0,
) -> None:
    """Write a model's first layers with random weights, and a tokenizer of meaningless tokens.

    Scaled rotations are left out. `scale` belongs to all but the embedding: with a small one, all tokens are about
    equally likely. With a `favour` above 0, each router chooses some experts more often: it is the standard deviation
    of the logarithms of the experts' scores.
    """
    import gguf
    import numpy as np

    kinds = config.get("layer_types", [])[:num_layers]
    few_layers = {"layer_types": kinds, "num_hidden_layers": num_layers, "num_kv_shared_layers": 0}
    config = {**config, **few_layers} if kinds else config
    architecture = str(architecture_in_gguf(config))
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(num_layers)
    for add, key in (
        (writer.add_context_length, "max_position_embeddings"),
        (writer.add_embedding_length, "hidden_size"),
        (writer.add_feed_forward_length, "intermediate_size"),
        (writer.add_head_count, "num_attention_heads"),
        (writer.add_layer_norm_rms_eps, "rms_norm_eps"),
        (writer.add_rope_freq_base, "rope_theta"),
        (writer.add_expert_count, "num_experts"),
        (writer.add_expert_count, "num_local_experts"),
        (writer.add_sliding_window, "sliding_window"),
        (writer.add_expert_used_count, "num_experts_per_tok"),
        (writer.add_expert_used_count, "top_k_experts"),
        (writer.add_expert_feed_forward_length, "moe_intermediate_size"),
        (writer.add_ssm_conv_kernel, "linear_conv_kernel_dim"),
        (writer.add_ssm_state_size, "linear_key_head_dim"),
        (writer.add_ssm_group_count, "linear_num_key_heads"),
        (writer.add_ssm_time_step_rank, "linear_num_value_heads"),
        (writer.add_full_attention_interval, "full_attention_interval"),
    ):
        if config.get(key) is not None:
            add(config[key])
    if architecture == "gemma4":
        _add_gemma4(writer, config)
    else:
        writer.add_head_count_kv(config["num_key_value_heads"])
        for add in (writer.add_key_length, writer.add_value_length):
            add(config["head_dim"])
    if "linear_num_value_heads" in config:
        writer.add_ssm_inner_size(config["linear_num_value_heads"] * config["linear_value_head_dim"])
        writer.add_rope_dimension_count(int(config["head_dim"] * config["partial_rotary_factor"]))
        writer.add_rope_dimension_sections([*config["rope_parameters"]["mrope_section"], 0])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(_meaningless_tokens(vocab_size))
    writer.add_token_merges(["t o"])
    writer.add_eos_token_id(0)
    kind = {name: kind for kind, name in gguf.MODEL_ARCH_NAMES.items()}[architecture]
    in_file = (gguf.TENSOR_NAMES[tensor] for tensor in gguf.MODEL_TENSORS[kind])
    endings = (".weight", ".bias", ".scale", "")
    every = [f"{name.format(bid=at)}{end}" for name in in_file for at in range(num_layers) for end in endings]
    few, weights = random_layers(config, num_layers, type_, vocab_size, scale)
    if favour:
        _favour_experts(weights, favour)
    attention = [at for at, layer in enumerate(few.layers) if isinstance(layer.mixer, Attention)]
    every = [name for name in every if not (".ssm_" in name and any(f"blk.{at}." in name for at in attention))]
    names = {ours: theirs for theirs, ours in names_from_gguf(every, form_of(architecture).names).items()}
    for at in attention:
        if gate := weights.pop(f"model.layers.{at}.self_attn.gate_proj.weight", None):  # a file has q and gate in turns
            q = f"model.layers.{at}.self_attn.q_proj.weight"
            weights[q] = make_weight(type_, 2 * gate.shape[0], gate.shape[1], scale=scale)
    for name in [name for name in weights if name.endswith(".decay")]:
        weights[name].data.fill_(-1)  # a file has -exp(log)
    if (table := weights.get(PER_LAYER_TABLE)) is not None:
        weights[PER_LAYER_TABLE] = make_weight(type_, *table.shape)
    head = functools.partial(make_weight, seed=1, scale=10 * scale)  # repeats no token
    weights["lm_head.weight"] = head(type_, vocab_size, config["hidden_size"])
    stacks = dict[str, list[StoredWeight]]()
    for name, weight in weights.items():
        stacks.setdefault(re.sub(r"(?<=\.experts\.)\d+\.", "", name), []).append(weight)
    repeated = functools.cache(lambda weight, times: np.repeat(weight.data.numpy()[None], times, axis=0))
    for name, stack in stacks.items():
        if stack[0].type == "BF16" and len(stack) == 1:
            values = stack[0].data.view(torch.uint8).numpy()  # NumPy does not have this type
        else:
            values = repeated(stack[0], len(stack)) if len(stack) > 1 else stack[0].data.numpy()
        if name not in names and ".experts.up_proj." in name:
            continue  # it is stored with gate
        if name not in names and ".experts.gate_proj." in name:
            up, name = stacks[name.replace("gate", "up")], name.replace("gate", "gate_up")
            values = np.concatenate([values, repeated(up[0], len(up))], axis=1)
        raw = None if stack[0].type == "F32" else gguf.GGMLQuantizationType[stack[0].type]
        writer.add_tensor(names[name], values, raw_dtype=raw)
    if architecture == "gemma4":
        factors = np.ones(config["global_head_dim"] // 2, np.float32)
        factors[len(factors) // 4 :] = 1e30  # pairs that do not rotate
        writer.add_tensor("rope_freqs.weight", factors)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _favour_experts(weights: dict[str, StoredWeight], favour: float) -> None:
    """Give each layer a router of its own, in which some experts have larger scores than others."""
    for seed, name in enumerate(name for name in weights if "router" in name):
        rows, columns = weights[name].shape
        router = make_weight("F32", rows, columns, seed)
        scales = torch.randn(rows, 1, generator=torch.Generator().manual_seed(seed)) * favour
        weights[name] = replace(router, data=router.data * scales.exp())


def _add_gemma4(writer: Any, config: dict[str, Any]) -> None:
    """Add the keys of Gemma 4 for its two kinds of layers. No layer uses an earlier one's keys and values."""
    is_sliding = [kind == "sliding_attention" for kind in config["layer_types"]]
    kv_heads = config["num_key_value_heads"], config.get("num_global_key_value_heads") or config["num_key_value_heads"]
    writer.add_head_count_kv([kv_heads[0 if sliding else 1] for sliding in is_sliding])
    writer.add_sliding_window_pattern(is_sliding)
    for add, size in (
        (writer.add_key_length, config["global_head_dim"]),
        (writer.add_value_length, config["global_head_dim"]),
        (writer.add_rope_dimension_count, config["global_head_dim"]),
        (writer.add_key_length_swa, config["head_dim"]),
        (writer.add_value_length_swa, config["head_dim"]),
        (writer.add_rope_dimension_count_swa, config["head_dim"]),
        (writer.add_rope_freq_base, 1e6),
        (writer.add_rope_freq_base_swa, 1e4),
        (writer.add_shared_kv_layers, 0),
        (writer.add_embedding_length_per_layer_input, config.get("hidden_size_per_layer_input") or 0),
        (writer.add_final_logit_softcapping, config["final_logit_softcapping"]),
    ):
        add(size)
