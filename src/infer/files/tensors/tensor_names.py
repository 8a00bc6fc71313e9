"""Hugging Face's and GGUF's names of tensors → our names.

The names are Hugging Face's for Llama, except for a layer's four norms. These are named by their place, because
`post_attention_layernorm` has two meanings in Hugging Face's models:

    model.layers.N.attention_norm        before attention       model.layers.N.mlp_norm        before the MLP
    model.layers.N.post_attention_norm   on attention's result  model.layers.N.post_mlp_norm   on the MLP's result

An unknown tensor keeps its name, so that the loader can list it as unexpected.
"""

import re
from collections.abc import Collection, Iterable

_GGUF_TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "token_embd_norm.weight": "model.norm.weight",  # LFM2's name of the last norm
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
    "per_layer_token_embd.weight": "model.embed_tokens_per_layer.weight",
    "per_layer_model_proj.weight": "model.per_layer_model_projection.weight",
    "per_layer_proj_norm.weight": "model.per_layer_projection_norm.weight",
}
_GGUF_LAYER = {
    "attn_norm": "attention_norm",
    "post_attention_norm": "post_attention_norm",
    "ffn_norm": "mlp_norm",
    "post_ffw_norm": "post_mlp_norm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_gate_up": "mlp.gate_up_proj",  # internal name of ffn_up without ffn_gate
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.router",
    "ffn_gate_exps": "mlp.experts.gate_proj",
    "ffn_up_exps": "mlp.experts.up_proj",
    "ffn_gate_up_exps": "mlp.experts.gate_up_proj",
    "ffn_down_exps": "mlp.experts.down_proj",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
    "ffn_gate_inp_shexp": "mlp.shared_gate",
    "inp_gate": "per_layer_input_gate",
    "proj": "per_layer_projection",
    "post_norm": "post_per_layer_input_norm",
    "pre_ffw_norm_2": "mlp.experts_norm",
    "post_ffw_norm_1": "mlp.post_shared_norm",
    "post_ffw_norm_2": "mlp.post_experts_norm",
    "shortconv.in_proj": "conv.in_proj",
    "shortconv.out_proj": "conv.out_proj",
    "linear_attn_qkv": "linear_attn.qkv_proj",  # internal name of attn_qkv in layers with ssm_conv1d
    "attn_gate": "self_attn.gate_proj",
    "linear_attn_gate": "linear_attn.z_proj",  # internal name of attn_gate in layers with ssm_conv1d
    "ssm_in": "linear_attn.qkvz_proj",
    "ssm_ba": "linear_attn.ba_proj",
    "ssm_beta": "linear_attn.b_proj",
    "ssm_alpha": "linear_attn.a_proj",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
}
# Tensors whose names end differently in our names.
_GGUF_VECTOR = {
    "exp_probs_b.bias": "mlp.router.correction",
    "ffn_gate_inp.scale": "mlp.router_norm.weight",
    "ffn_down_exps.scale": "mlp.router.expert_scales",
    "attn_sinks.weight": "self_attn.sinks",
    "layer_output_scale.weight": "layer_scalar",
    "shortconv.conv.weight": "conv.taps",
    "ssm_conv1d.weight": "linear_attn.taps",
    "ssm_dt.bias": "linear_attn.dt_bias",
    "ssm_a": "linear_attn.decay",
}
# Architectures whose files name the norm before the MLP by its place after attention.
_WITH_POST_ATTENTION_NORM = frozenset({"glm4moe", "gpt-oss", "seed_oss", "qwen3next", "qwen35", "qwen35moe"})
_LAST_NORM_OF_LFM2 = frozenset({"lfm2", "lfm2moe"})
_TWO_NORMS = {
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "mlp_norm",
    "operator_norm": "attention_norm",  # LFM2
    "ffn_norm": "mlp_norm",
    "attention_layer_norm": "attention_norm",  # OLMo-hybrid
    "feedforward_layer_norm": "mlp_norm",
    "post_self_attn_layernorm": "post_attention_norm",  # GLM-4
    "post_mlp_layernorm": "post_mlp_norm",
}
_FOUR_NORMS = {
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "post_attention_norm",
    "feedforward_layer_norm": "post_attention_norm",  # OLMo-hybrid, in files of transformers
    "pre_feedforward_layernorm": "mlp_norm",
    "post_feedforward_layernorm": "post_mlp_norm",
    "pre_mlp_layernorm": "mlp_norm",  # AFMoE
    "post_mlp_layernorm": "post_mlp_norm",
    "post_feedforward_layernorm_1": "mlp.post_shared_norm",  # Gemma 4, with experts in parallel to the MLP
    "pre_feedforward_layernorm_2": "mlp.experts_norm",
    "post_feedforward_layernorm_2": "mlp.post_experts_norm",
}
# Names of the parts of experts: in Qwen, OLMoE and GLM; in Granite, Mixtral and Gemma 4. The last are parts of LFM2 and
# Llama 4, and of gated delta nets.
_PARTS = (
    (re.compile(r"(model\.layers\.[0-9]+\.)mlp\.gate\.(wg\.)?weight"), r"\1mlp.router.weight"),
    (re.compile(r"\.mlp\.((gate|experts|moe_statics)\.)*(e_score_correction|expert)_bias"), ".mlp.router.correction"),
    (re.compile(r"\.block_sparse_moe\.e_score_correction_bias"), ".mlp.router.correction"),
    (re.compile(r"\.mlp\.router\.gate\."), ".mlp.router."),
    (re.compile(r"\.self_attn\.g_proj\."), ".self_attn.gate_proj."),
    (re.compile(r"\.mlp\.(shared_experts|shared_mlp)\."), ".mlp.shared_expert."),
    (re.compile(r"(model\.layers\.[0-9]+\.)mlp\.shared_expert_gate\.weight"), r"\1mlp.shared_gate.weight"),
    (re.compile(r"(model\.layers\.[0-9]+\.)mlp\.experts\.(gate_up|down)_proj"), r"\1mlp.experts.\2_proj.weight"),
    (re.compile(r"(mlp\.experts\.(gate_up|down)_proj)\.weight_(bias|blocks|scales)"), r"\1.\3"),
    (re.compile(r"(model\.layers\.[0-9]+\.)block_sparse_moe\.gate\.weight"), r"\1mlp.router.weight"),
    (re.compile(r"(model\.layers\.[0-9]+\.)block_sparse_moe\.router\.layer\.weight"), r"\1mlp.router.weight"),
    (re.compile(r"(model\.layers\.[0-9]+\.)block_sparse_moe\.input_linear"), r"\1mlp.experts.gate_up_proj"),
    (re.compile(r"(model\.layers\.[0-9]+\.)block_sparse_moe\.output_linear"), r"\1mlp.experts.down_proj"),
    (re.compile(r"(model\.layers\.[0-9]+\.)shared_mlp\.input_linear"), r"\1mlp.shared_expert.gate_up_proj"),
    (re.compile(r"(model\.layers\.[0-9]+\.)shared_mlp\.output_linear"), r"\1mlp.shared_expert.down_proj"),
    (re.compile(r"block_sparse_moe\.experts\.([0-9]+)\.w1\."), r"mlp.experts.\1.gate_proj."),
    (re.compile(r"block_sparse_moe\.experts\.([0-9]+)\.w3\."), r"mlp.experts.\1.up_proj."),
    (re.compile(r"block_sparse_moe\.experts\.([0-9]+)\.w2\."), r"mlp.experts.\1.down_proj."),
    (re.compile(r"(model\.layers\.[0-9]+\.)router\.proj\.weight"), r"\1mlp.router.weight"),
    (re.compile(r"(model\.layers\.[0-9]+\.)router\.scale"), r"\1mlp.router_norm.weight"),
    (re.compile(r"(model\.layers\.[0-9]+\.)router\.per_expert_scale"), r"\1mlp.router.expert_scales"),
    (re.compile(r"(model\.layers\.[0-9]+\.)experts\.(gate_up|down)_proj"), r"\1mlp.experts.\2_proj.weight"),
    (re.compile(r"\.feed_forward\.(experts\.[0-9]+\.)?w1\."), r".mlp.\1gate_proj."),
    (re.compile(r"\.feed_forward\.(experts\.[0-9]+\.)?w3\."), r".mlp.\1up_proj."),
    (re.compile(r"\.feed_forward\.(experts\.[0-9]+\.)?w2\."), r".mlp.\1down_proj."),
    (re.compile(r"\.feed_forward\.experts\.(gate_up|down)_proj"), r".mlp.experts.\1_proj.weight"),
    (re.compile(r"\.feed_forward\.gate\."), ".mlp.router."),
    (re.compile(r"\.feed_forward\.((router|shared_expert|(gate|up|down)_proj)\.)"), r".mlp.\1"),
    (re.compile(r"\.feed_forward\.expert_bias"), ".mlp.router.correction"),
    (re.compile(r"\.self_attn\.(out_proj|dense)\."), ".self_attn.o_proj."),
    (re.compile(r"\.mlp\.(c_fc|fc1|dense_h_to_4h)\."), ".mlp.up_proj."),
    (re.compile(r"\.mlp\.(c_proj|fc2|dense_4h_to_h)\."), ".mlp.down_proj."),
    (re.compile(r"\.self_attn\.([qk])(?:uery|ey)?_layernorm\."), r".self_attn.\1_norm."),
    (re.compile(r"\.conv\.conv\.weight"), ".conv.taps"),
    (re.compile(r"\.conv\.conv\.bias"), ".conv.bias"),
    (re.compile(r"model\.(embedding_norm|final_layernorm|final_layer_norm)\."), "model.norm."),
    (re.compile(r"\.linear_attn\.in_proj_(qkv|qkvz|z|b|a|ba)\."), r".linear_attn.\1_proj."),
    (re.compile(r"\.linear_attn\.conv1d\.weight"), ".linear_attn.taps"),
    (re.compile(r"\.linear_attn\.A_log"), ".linear_attn.decay"),
    (re.compile(r"\.linear_attn\.([qkv])_conv1d\.weight"), r".linear_attn.\1_taps"),
    (re.compile(r"\.linear_attn\.g_proj\."), ".linear_attn.z_proj."),
    (re.compile(r"\.linear_attn\.o_norm\."), ".linear_attn.norm."),
    (re.compile(r"\.linear_attn\.o_proj\."), ".linear_attn.out_proj."),
)
# Names that are unchanged, the majority: large models have 100,000 names.
_OURS = re.compile(
    r"model\.layers\.[0-9]+\.(self_attn\.[qkvo]_proj|mlp\.(experts\.[0-9]+\.)?(gate|up|down)_proj)\.(weight|bias)"
)
_TOP_IN_GGUF = {ours: theirs for theirs, ours in _GGUF_TOP.items()}
_VECTOR_IN_GGUF = {ours: theirs for theirs, ours in _GGUF_VECTOR.items()}
_LAYER_IN_GGUF = {ours: theirs for theirs, ours in _GGUF_LAYER.items()}
_LAYER_IN_GGUF |= {"linear_attn.qkv_proj": "attn_qkv", "linear_attn.z_proj": "attn_gate", "mlp.gate_up_proj": "ffn_up"}
_OUR_LAYER = re.compile(r"model\.layers\.([0-9]+)\.(.+)")
_GGUF_PATTERN = re.compile(r"blk\.(0|[1-9][0-9]*)\.(.+)")
_NEOX = {"gpt_neox.": "model.", "embed_in.": "embed_tokens.", "embed_out.": "lm_head.", ".attention.": ".self_attn."}
_NORM_PATTERN = re.compile(r"(model\.layers\.[0-9]+\.)(\w+)(\.(?:weight|bias))")
_TEXT_PREFIX = re.compile(r"(model\.language_model\.|language_model\.model\.)")
_OF_FOUR = re.compile(r"_feedforward_layernorm\.|\.pre_mlp_layernorm\.")
_WITHOUT_MODEL = re.compile(r"(embed_tokens|layers\.[0-9]+|norm)\.")  # names in files of embedding models

# Tensors that are not part of the text network, are made from the config, or are only for drafting tokens (mtp).
# Ollama's files have the networks for images ("v", "mm") and sounds ("a") beside the text network.
_SKIPPED_GGUF = re.compile(r"(v|mm|a)\.|rope_(freqs|factors_long|factors_short)\.weight")
_SKIPPED = re.compile(
    r"(model\.)?(vision_tower|vision_model|visual|audio_tower|embed_audio|multi_modal_projector|embed_vision|vision_adapter|vision_projection|mtp)\.|.*\.(rotary_emb\.inv_freq|attention\.(masked_)?bias)$"
)


def names_from_gguf(names: Iterable[str]) -> dict[str, str]:
    """Return our name for each name in the file, without tensors that are not weights."""
    kept = [name for name in names if not _SKIPPED_GGUF.match(name)]
    has_gate = any(".ffn_gate." in name or ".ffn_gate_inp." in name for name in kept)
    has_mlp_norm = any(".ffn_norm." in name or ".post_ffw_norm." in name for name in kept)
    usual = {name: name if has_gate else name.replace(".ffn_up.", ".ffn_gate_up.") for name in kept}
    if not has_mlp_norm:  # then the norm after attention is the norm before the MLP
        usual = {name: alias.replace(".post_attention_norm.", ".ffn_norm.") for name, alias in usual.items()}
    for name in [name for name in kept if name.endswith(".ssm_conv1d.weight")]:
        for which in ("qkv", "gate"):
            own = name.replace(".ssm_conv1d.", f".attn_{which}.")
            usual |= {own: own.replace(".attn_", ".linear_attn_")} if own in usual else {}
    return {name: _from_gguf(alias) for name, alias in usual.items()}


def name_in_gguf(name: str, architecture: str) -> str | None:
    """Return the name of one of our tensors in a GGUF file of this architecture, or None if there is none.

    It is the inverse of `names_from_gguf`. Stacks of experts have the names of `stacked_experts`, without a number.
    """
    if name == "model.norm.weight" and architecture in _LAST_NORM_OF_LFM2:
        return "token_embd_norm.weight"
    match = _OUR_LAYER.fullmatch(name)
    if match is None:
        return _TOP_IN_GGUF.get(name)
    if (vector := _VECTOR_IN_GGUF.get(match[2])) is not None:
        return f"blk.{match[1]}.{vector}"
    module, _, kind = match[2].rpartition(".")
    if module == "mlp_norm" and architecture in _WITH_POST_ATTENTION_NORM:
        return f"blk.{match[1]}.post_attention_norm.{kind}"
    own = _LAYER_IN_GGUF.get(module)
    return None if own is None or kind not in ("weight", "bias") else f"blk.{match[1]}.{own}.{kind}"


def is_skipped(name: str) -> bool:
    """Return True if a tensor with this Hugging Face name is not a weight of the text network."""
    return _SKIPPED.match(name) is not None


def names_from_hugging_face(names: Iterable[str]) -> dict[str, str]:
    """Return our name for each name in the file, without vision towers and buffers."""
    kept = {name: _without_prefix(name) for name in names if not is_skipped(name)}
    with_four = {_layer_of(ours) for ours in kept.values() if _OF_FOUR.search(ours)}
    return {name: ours if _OURS.fullmatch(ours) else _renamed(ours, with_four) for name, ours in kept.items()}


def _layer_of(name: str) -> str:
    """Return the beginning of all names of a layer."""
    match = _NORM_PATTERN.fullmatch(name)
    return "" if match is None else match[1]


def _renamed(name: str, with_four: Collection[str]) -> str:
    """Return our name. The layers in `with_four` have norms of results."""
    norms = _FOUR_NORMS if _layer_of(name) in with_four else _TWO_NORMS
    for pattern, ours in _PARTS:
        name = pattern.sub(ours, name)
    return _NORM_PATTERN.sub(lambda match: match[1] + norms.get(match[2], match[2]) + match[3], name)


def is_norm(name: str) -> bool:
    """Return True if one of our names is the weight of a norm, except the norm in a gated delta net."""
    return name.endswith("norm.weight") and not name.endswith(".linear_attn.norm.weight")


def _from_gguf(name: str) -> str:
    match = _GGUF_PATTERN.fullmatch(name)
    if match is None:
        return _GGUF_TOP.get(name, name)
    module, _, kind = match[2].rpartition(".")
    own = _GGUF_VECTOR.get(match[2])
    if own is None and module in _GGUF_LAYER and kind in ("weight", "bias"):
        own = f"{_GGUF_LAYER[module]}.{kind}"
    return name if own is None else f"model.layers.{match[1]}.{own}"


def _without_prefix(name: str) -> str:
    if name.startswith(("gpt_neox.", "embed_out.")):
        for theirs, ours in _NEOX.items():
            name = name.replace(theirs, ours)
    if _WITHOUT_MODEL.match(name):
        return f"model.{name}"
    text = _TEXT_PREFIX.sub("model.", name, count=1) if _TEXT_PREFIX.match(name) else name
    return text.removeprefix("language_model.") if text.startswith("language_model.lm_head.") else text
