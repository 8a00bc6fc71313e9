"""Config → `Architecture`: the only place that distinguishes model families.

A config is a mapping with the names of Hugging Face's `config.json`; `files` gives GGUF metadata the same names. A
`Family` describes the values that its published configs leave out, and the optional settings that its code reads.
`table` and `encoders` have one row per family. An unsupported family is refused with the part that it needs. A setting
that `transformers` ignores is ignored here, unless other engines read it: then it is refused.
"""

import re
from dataclasses import replace
from pathlib import Path

from infer.compute.operands.architecture import Architecture, Layer, Norms
from infer.compute.operands.feed_forwards import Dense, Experts
from infer.compute.operands.mixers import MAX_HEADS, Attention, Mixer, QKNorm
from infer.errors import ModelError, UnsupportedModelError
from infer.files import Checkpoint, open_checkpoint
from infer.models.families.config_values import Config, choice, count, flag, optional_count, optional_positive, positive
from infer.models.families.encoders import ENCODERS
from infer.models.families.experts import make_experts
from infer.models.families.family import OFF_IF_NULL, OPTIONAL, Family
from infer.models.families.heads import heads_of_layers, per_layer_input, sigmoid_of_elements
from infer.models.families.layer_kinds import CHUNKED, SLIDING, sources_of_keys
from infer.models.families.rope_scaling import make_rope
from infer.models.families.table import FAMILIES
from infer.models.families.whole_texts import sees_whole_texts, without_mask
from infer.models.families.widths import head_dim_of, num_layers_of
from infer.models.tensors import check_tensors

__all__ = ["ENCODERS", "FAMILIES", "as_read", "family_of", "make_architecture", "open_network"]

# Unsupported parts, and the models that need them, by their names in Hugging Face's and GGUF's files.
_MODELS_BY_PART = {
    "latent attention": (
        *("deepseek_v2", "deepseek_v3", "deepseek2", "kimi_k2", "glm4_moe_lite", "deepseek_v32", "minicpm3"),
        *("longcat_flash", "kimi_linear", "youtu", "sarvam_mla", "mistral4", "mistral_large4", "mistral_large4_text"),
        *("glm_moe_dsa", "glm5_next", "glm5_next_text", "hy_v4", "axk1", "axk2", "dots3_note", "bailing_hybrid"),
        *("kimi-linear", "glm-dsa", "deepseek32", "deepseek2-ocr"),
    ),
    "the state-space layers of Mamba2": (
        *("granitemoehybrid", "nemotron_h", "mamba2", "bamba", "falcon_h1", "zamba2"),
        *("granitehybrid", "nemotron_h_moe", "falcon-h1"),
    ),
    "the state-space layers of Mamba": ("mamba", "falcon_mamba", "jamba", "zamba"),
    "other recurrent layers": ("recurrent_gemma", "rwkv", "rwkv6", "rwkv7", "rwkv6qwen2", "arwkv7", "xlstm"),
    "lightning attention": ("minimax",),
    "attention to compressed keys": ("deepseek_v4", "deepseek4"),
    "attention to tokens that an indexer chooses": ("qwen4_exp", "qwen4_exp_text"),
    "the difference of two attentions": ("diffllama",),
    "experts of attention": ("jetmoe",),
    "values of another length than keys": ("mimo_v2_flash", "mimo2"),
    "a limit of q, k and v": ("dbrx",),
    "experts that are chosen by SparseMixer": ("phimoe",),
    "norms before the last products of attention and MLP": ("bitnet",),
    "an encoder beside the decoder": ("t5", "mt5", "umt5", "bart", "t5gemma", "t5gemma2", "t5encoder"),
    "a bias of attention by distance": ("mpnet", "bloom", "mpt", "jais", "refact"),
    "four parallel residual streams": ("gemma3n", "gemma3n_text"),
    "the model_type of its text_config": ("mistral3",),
}
_NEEDS = {model: part for part, models in _MODELS_BY_PART.items() for model in models}


def open_network(model: str | Path) -> tuple[Checkpoint, Architecture]:
    """Return the open files of a model, and its architecture. Raises ModelError if its tensors do not fit that."""
    checkpoint = open_checkpoint(model)
    architecture = make_architecture(checkpoint.config)
    check_tensors(architecture, checkpoint.tensors)
    return checkpoint, architecture


def make_architecture(config: Config) -> Architecture:
    """Return the architecture that a config describes.

    Raises UnsupportedModelError for an unsupported family or setting, and ModelError for an invalid value.
    """
    family = family_of(config)
    try:
        return _make_architecture(as_read(config, family), family)
    except ModelError as error:
        raise type(error)(_with_own_names(str(error), config, family)) from None


def _with_own_names(message: str, config: Config, family: Family) -> str:
    """Return the message with the names that the config gives to settings, where the family has others."""
    own_names = dict[str, str]()
    for own, name in family.renamed_pairs:
        if name not in config and (own in config or name not in own_names):
            own_names[name] = own
    return re.sub(r"\w+", lambda word: own_names.get(word[0], word[0]), message)


def _make_architecture(config: Config, family: Family) -> Architecture:
    is_whole = not family.is_encoder and sees_whole_texts(config, family)
    # If a residual stream is divided by m, each layer adds m × its result, and norms have eps / m².
    residual = positive(config, "residual_multiplier", 1.0)
    embedding = positive(config, "embedding_multiplier", 1.0)
    scales = family.scales_embedding
    if flag(config, scales) if isinstance(scales, str) else scales:
        embedding *= count(config, "hidden_size") ** 0.5
    inputs = None if family.text_inputs is None else family.text_inputs(config)
    layers = _layers(config, family)
    architecture = Architecture(
        family=str(config["model_type"]),
        vocab_size=count(config, "vocab_size"),
        hidden_size=count(config, "hidden_size"),
        layers=layers,
        norm_eps=positive({"rms_norm_eps": positive(config, "rms_norm_eps") / residual**2}, "rms_norm_eps"),
        max_positions=(inputs and inputs.num_positions) or count(config, "max_position_embeddings"),
        text_limit=optional_count(config, "text_limit"),
        has_embedding_norm=family.has_embedding_norm,
        text_inputs=inputs,
        has_last_norm=not layers[-1].norms.of_sum,
        embedding_scale=positive({"embedding_multiplier": embedding / residual}, "embedding_multiplier"),
        logit_scale=positive(config, "output_multiplier", 1.0) / positive(config, "logits_scaling", 1.0),
        logit_softcap=optional_positive(config, "final_logit_softcapping"),
        tied_embeddings=flag(config, "tie_word_embeddings"),
        has_head_bias=flag(config, "lm_head_bias"),
    )
    beyond = sorted({long.beyond for long in architecture.long_ropes})
    if len(beyond) > 1:
        raise UnsupportedModelError(f"ropes that change at several lengths are not supported, got {beyond}")
    return without_mask(architecture, config, family) if is_whole else architecture


def family_of(config: Config) -> Family:
    """Return the row of a config's family.

    Raises UnsupportedModelError for an unsupported family, and for a setting that the family refuses.
    """
    name = str(config.get("model_type", ""))
    if name in _NEEDS:
        raise UnsupportedModelError(f"model_type {name!r} is not supported: it needs {_NEEDS[name]}")
    if (family := FAMILIES.get(name) or ENCODERS.get(name)) is None:
        names = ", ".join(sorted([*FAMILIES, *ENCODERS]))
        code = "; the code that auto_map names is never run" if config.get("auto_map") else ""
        problem = f"model_type {name or 'missing'!r:.60} is not supported{code}: supported are {names}"
        raise UnsupportedModelError(problem)
    for setting, only in family.refuses.items():
        if config.get(setting) not in (only, None):
            raise UnsupportedModelError(
                f"{setting}={config[setting]!r:.60} is not supported for {name}: it must be {only}"
            )
    return family


def as_read(config: Config, family: Family) -> Config:
    """Return the config with the family's defaults added, and without the settings that the family's code ignores."""
    unread = OPTIONAL - family.reads
    by_own_name = {name: config[own] for own, name in family.renamed_pairs if own in config}
    usual = {name: value for name, value in config.items() if name not in family.renamed} | by_own_name
    given = {name: value for name, value in usual.items() if value is not None or name in OFF_IF_NULL}
    read = {name: value for name, value in given.items() if name not in unread}
    return {**family.defaults, **read, **family.fixed}


def _layers(config: Config, family: Family) -> tuple[Layer, ...]:
    num_layers = num_layers_of(config)
    kinds, rotated = family.layer_kinds(config, num_layers), family.rotated_layers(config, num_layers)
    wanted = list(zip(kinds, rotated, heads_of_layers(config, num_layers), strict=True))
    mixer_by_kind = {each: _mixer(config, family, *each) for each in sorted(set(wanted))}
    activation = choice(config, family.activation_name, family.activations)
    experts = None if family.experts is None else make_experts(config, activation, family.experts)
    are_sparse = [experts is not None and family.is_sparse(config, index) for index in range(num_layers)]
    dense = None
    if not all(are_sparse):
        dense = Dense(
            family.dense_size(config), activation, has_bias=flag(config, "mlp_bias"), is_gated=family.is_gated
        )
    norms = family.norms if isinstance(family.norms, Norms) else family.norms(config)
    sources = sources_of_keys(config, kinds)
    own_input = per_layer_input(config, activation)
    layers = [
        Layer(
            mixer_by_kind[each],
            experts if is_sparse else dense,
            family.norms_by_kind.get(each[0], norms),
            own_input,
            family.has_scale,
        )
        for each, is_sparse in zip(wanted, are_sparse, strict=True)
    ]
    if family.is_encoder:  # its first mixer reads the embeddings, which were just normalised
        layers[0] = replace(layers[0], norms=replace(norms, skip_mixer=norms.before))
    return tuple(
        layer if source is None else _sharing(config, layer, source)
        for layer, source in zip(layers, sources, strict=True)
    )


def _sharing(config: Config, layer: Layer, source: int) -> Layer:
    """Return the layer without its own keys and values."""
    mixer, feed_forward = layer.mixer, layer.feed_forward
    assert isinstance(mixer, Attention)
    if flag(config, "use_double_wide_mlp"):
        if isinstance(feed_forward, Experts):
            feed_forward = replace(feed_forward, shared_size=2 * feed_forward.shared_size)
        elif feed_forward is not None:
            feed_forward = replace(feed_forward, intermediate_size=2 * feed_forward.intermediate_size)
    mixer = replace(mixer, shared_from=source, has_v_norm=False, are_values_keys=False)
    return replace(layer, mixer=mixer, feed_forward=feed_forward)


def _mixer(config: Config, family: Family, kind: str, is_rotated: bool, num_heads: int) -> Mixer:
    if kind in family.recurrent:
        return family.recurrent[kind](config)
    return _attention({**config, "num_attention_heads": num_heads}, family, kind, is_rotated)


def _attention(config: Config, family: Family, kind: str, is_rotated: bool) -> Attention:
    config = family.of_kind(config, kind, is_rotated)
    num_heads = count(config, "num_attention_heads", maximum=MAX_HEADS)
    num_kv_heads = count(config, "num_key_value_heads", default=num_heads)
    if num_heads % num_kv_heads:
        raise ModelError(f"num_attention_heads={num_heads} must be a multiple of num_key_value_heads={num_kv_heads}")
    head_dim = head_dim_of(config)
    rope = {"partial_rotary_factor": config.get("partial_rotary_factor", 1.0), **family.rope_settings(config, kind)}
    if "partial_rotary_factor" not in family.defaults and rope["partial_rotary_factor"] != 1:
        refused = f"partial_rotary_factor={rope['partial_rotary_factor']!r:.60}"
        raise UnsupportedModelError(f"{refused} is not supported for {config['model_type']}")
    if family.gates is not None and config.get("attn_output_gate") is False:
        raise UnsupportedModelError(f"attn_output_gate=false is not supported for {config['model_type']}")
    gate_curve, are_gates_of_heads = (sigmoid_of_elements if family.gates is None else family.gates)(config)
    has_qkv_bias = flag(config, "attention_bias")
    scale = positive(config, "query_pre_attn_scalar", float(head_dim)) ** -0.5
    return Attention(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rope=make_rope(config, head_dim, rope) if is_rotated else None,
        scale=positive(config, "attention_multiplier", scale),
        window=count(config, "sliding_window") if kind == SLIDING else None,
        chunk=count(config, "attention_chunk_size") if kind == CHUNKED else None,
        softcap=optional_positive(config, "attn_logit_softcapping"),
        has_qkv_bias=has_qkv_bias,
        has_output_bias=flag(config, "attention_output_bias") if "attention_output_bias" in config else has_qkv_bias,
        has_sinks=family.has_sinks,
        has_gate=family.gates is not None,
        gate_curve=gate_curve,
        are_gates_of_heads=are_gates_of_heads,
        has_v_norm=family.has_v_norm,
        are_values_keys=flag(config, "attention_k_eq_v"),
        query_scale=family.query_scale(config),
        qk_norm=_qk_norm(config, family),
        is_causal=not family.is_encoder,
    )


def _qk_norm(config: Config, family: Family) -> QKNorm | None:
    """Return the norms of q and k. Only GGUF files have the setting `qk_norm_has_weights`."""
    if family.qk_norm_setting is not None and not flag(config, family.qk_norm_setting):
        return None
    return "head" if flag(config, "qk_norm_has_weights") else family.qk_norm
