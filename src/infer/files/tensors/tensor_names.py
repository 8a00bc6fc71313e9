"""Hugging Face's and GGUF's names of tensors → our names, also those of encoders and of heads that draft tokens.

The names are Hugging Face's for Llama, except for a layer's four norms. These are named by their place, because
`post_attention_layernorm` has two meanings in Hugging Face's models:

    model.layers.N.attention_norm        before attention       model.layers.N.mlp_norm        before the MLP
    model.layers.N.post_attention_norm   on attention's result  model.layers.N.post_mlp_norm   on the MLP's result

An unknown tensor keeps its name, so that the loader can list it as unexpected.

A head that drafts tokens is beside the network in a model's files: `mtp.*`, or a layer more. Its names here are those
of a model with one layer, which also has `eh_proj`, `enorm` and `hnorm` (`models.layers.extra_inputs` has the
equations). The head shares the network's embedding and its projection to logits.
"""

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from types import MappingProxyType
from typing import Any

from infer.errors import ModelError
from infer.files.tensors.tensor_info import TensorInfo


def _compiled(*parts: tuple[str, str]) -> list[tuple[re.Pattern[str], str]]:
    """Return compiled patterns of names, each with its replacement."""
    return [(re.compile(pattern), ours) for pattern, ours in parts]


_GGUF_MODULES = {  # outside of layers, then within a layer
    "token_embd": "model.embed_tokens",
    "position_embd": "model.embed_positions",
    "token_types": "model.embed_types",
    "output_norm": "model.norm",
    "output": "lm_head",
    "per_layer_token_embd": "model.embed_tokens_per_layer",
    "per_layer_model_proj": "model.per_layer_model_projection",
    "per_layer_proj_norm": "model.per_layer_projection_norm",
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
    "nextn.eh_proj": "eh_proj",
    "nextn.enorm": "enorm",
    "nextn.hnorm": "hnorm",
    "nextn.shared_head_norm": "shared_head.norm",
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
    # Values of arrays in the metadata, with one for each layer:
    "xielu.alpha_p": "mlp.act_fn.alpha_p",
    "xielu.alpha_n": "mlp.act_fn.alpha_n",
    "xielu.beta": "mlp.act_fn.beta",
    "xielu.eps": "mlp.act_fn.eps",
}
_NORMS_IN_FILES = {  # our names, each with the names of families
    "attention_norm": ("input_layernorm", "operator_norm", "attention_layer_norm", "attention_layernorm", "ln_1"),
    "post_attention_norm": ("post_self_attn_layernorm", "post_attn_norm", "post_operator_norm", "post_norm1"),
    "mlp_norm": (
        *("post_attention_layernorm", "feedforward_layer_norm", "feedforward_layernorm", "ffn_norm", "ln_2"),
        *("pre_feedforward_layernorm", "pre_mlp_layernorm"),
    ),
    "post_mlp_norm": ("post_feedforward_layernorm", "post_mlp_layernorm", "post_ffn_norm", "post_norm2"),
    # With experts in parallel to the MLP, as in Gemma 4:
    "mlp.post_shared_norm": ("post_feedforward_layernorm_1",),
    "mlp.experts_norm": ("pre_feedforward_layernorm_2",),
    "mlp.post_experts_norm": ("post_feedforward_layernorm_2",),
}
_NORMS = {theirs: ours for ours, names in _NORMS_IN_FILES.items() for theirs in names}
_NORMS_OF_FOUR = _NORMS | {  # in layers that have a norm before the MLP under a name of its own
    "post_attention_layernorm": "post_attention_norm",
    "feedforward_layer_norm": "post_attention_norm",  # OLMo-hybrid, in files of transformers
}
# Names of the parts of experts, of LFM2 and Llama 4, and of gated delta nets. Families have several names of one part.
_PARTS = _compiled(
    (
        r"(model\.layers\.[0-9]+\.)(mlp\.gate(\.wg)?|block_sparse_moe\.(gate|router(\.layer)?)|router\.proj)\.weight",
        r"\1mlp.router.weight",
    ),
    (
        r"\.(mlp|block_sparse_moe|feed_forward)\.((gate|experts|moe_statics)\.)*(e_score_correction|expert)_bias",
        ".mlp.router.correction",
    ),
    (r"\.mlp\.router\.gate\.", ".mlp.router."),
    (r"\.self_attn\.g_proj\.", ".self_attn.gate_proj."),
    (r"\.self_attn\.(softmax_offset|attention_sink_bias)", ".self_attn.sinks"),
    (r"\.attn\.attention\.", ".self_attn."),
    (r"\.attn\.c_attn\.", ".self_attn.qkv_proj."),  # GPT-2
    (r"\.attn\.c_proj\.", ".self_attn.o_proj."),
    (r"(model\.layers\.[0-9]+)\.attention\.query_key_value\.", r"\1.self_attn.qkv_proj."),
    (r"(model\.layers\.[0-9]+)\.attention\.", r"\1.self_attn."),
    (r"^model\.word_embeddings\.", "model.embed_tokens."),
    (r"\.moe\.router\.expert_bias", ".mlp.router.correction"),
    (r"\.mlp\.c_fc_0\.", ".mlp.gate_proj."),
    (r"\.mlp\.c_fc_1\.", ".mlp.up_proj."),
    (r"\.mlp\.(shared_experts|shared_mlp)\.", ".mlp.shared_expert."),
    (r"(model\.layers\.[0-9]+\.)shared_mlp\.input_linear", r"\1mlp.shared_expert.gate_up_proj"),
    (r"(model\.layers\.[0-9]+\.)shared_mlp\.output_linear", r"\1mlp.shared_expert.down_proj"),
    (r"(model\.layers\.[0-9]+\.)mlp\.shared_expert_gate\.weight", r"\1mlp.shared_gate.weight"),
    (
        r"(model\.layers\.[0-9]+\.)((mlp|feed_forward|block_sparse_moe)\.)?experts\.(gate_up|down)_proj",
        r"\1mlp.experts.\4_proj.weight",
    ),
    (r"(mlp\.experts\.(gate_up|down)_proj)\.weight_(bias|blocks|scales)", r"\1.\3"),
    (r"(model\.layers\.[0-9]+\.)block_sparse_moe\.input_linear", r"\1mlp.experts.gate_up_proj"),
    (r"(model\.layers\.[0-9]+\.)block_sparse_moe\.output_linear", r"\1mlp.experts.down_proj"),
    (r"(model\.layers\.[0-9]+\.)router\.scale", r"\1mlp.router_norm.weight"),
    (r"(model\.layers\.[0-9]+\.)router\.per_expert_scale", r"\1mlp.router.expert_scales"),
    (r"\.(block_sparse_moe|feed_forward)\.(experts\.[0-9]+\.)?w1\.", r".mlp.\2gate_proj."),
    (r"\.(block_sparse_moe|feed_forward)\.(experts\.[0-9]+\.)?w3\.", r".mlp.\2up_proj."),
    (r"\.(block_sparse_moe|feed_forward)\.(experts\.[0-9]+\.)?w2\.", r".mlp.\2down_proj."),
    (r"\.feed_forward\.gate\.", ".mlp.router."),
    (r"\.feed_forward\.((router|shared_expert|(gate|up|down)_proj)\.)", r".mlp.\1"),
    (r"\.self_attn\.(out_proj|dense)\.", ".self_attn.o_proj."),
    (r"\.mlp\.(c_fc|fc1|dense_h_to_4h)\.", ".mlp.up_proj."),
    (r"\.mlp\.(c_proj|fc2|dense_4h_to_h)\.", ".mlp.down_proj."),
    (r"\.self_attn\.([qk])(?:uery|ey)?_layernorm\.", r".self_attn.\1_norm."),
    (r"\.conv\.conv\.weight", ".conv.taps"),
    (r"\.conv\.conv\.bias", ".conv.bias"),
    (r"model\.(embedding_norm|final_layer_?norm)\.", "model.norm."),
    (r"\.linear_attn\.in_proj_(qkv|qkvz|z|b|a|ba)\.", r".linear_attn.\1_proj."),
    (r"\.linear_attn\.conv1d\.weight", ".linear_attn.taps"),
    (r"\.linear_attn\.A_log", ".linear_attn.decay"),
    (r"\.linear_attn\.([qkv])_conv1d\.weight", r".linear_attn.\1_taps"),
    (r"\.linear_attn\.g_proj\.", ".linear_attn.z_proj."),
    (r"\.linear_attn\.o_norm\.", ".linear_attn.norm."),
    (r"\.linear_attn\.o_proj\.", ".linear_attn.out_proj."),
)
# Names that are unchanged, the majority: large models have 100,000 names.
_OURS = re.compile(
    r"model\.layers\.[0-9]+\.(self_attn\.[qkvo]_proj|mlp\.(experts\.[0-9]+\.)?(gate|up|down)_proj)\.(weight|bias)"
)
_VECTOR_IN_GGUF = {ours: theirs for theirs, ours in _GGUF_VECTOR.items()}
_MODULE_IN_GGUF = {ours: theirs for theirs, ours in _GGUF_MODULES.items()}
_MODULE_IN_GGUF |= {"linear_attn.qkv_proj": "attn_qkv", "linear_attn.z_proj": "attn_gate"}
_USUAL: Mapping[str, str] = MappingProxyType({})
_OUR_LAYER = re.compile(r"model\.layers\.([0-9]+)\.(.+)")
_GGUF_LAYER = re.compile(r"blk\.(0|[1-9][0-9]*)\.(.+)")
_GPT = {"wpe.": "model.embed_positions.", "wte.": "model.embed_tokens.", "h.": "model.layers.", "ln_f.": "model.norm."}
_NEOX = {"gpt_neox.": "model.", "embed_in.": "embed_tokens.", "embed_out.": "lm_head.", ".attention.": ".self_attn."}
_NORM_PATTERN = re.compile(r"(model\.layers\.[0-9]+\.)(\w+)(\.(?:weight|bias))")
_TEXT_PREFIX = re.compile(r"(model\.language_model\.|language_model\.model\.)")
_OF_FOUR = re.compile(r"_feedforward_layernorm\.|\.pre_mlp_layernorm\.")
_WITHOUT_MODEL = re.compile(r"(embed_tokens|layers\.[0-9]+|norm)\.")  # names in files of embedding models

# Tensors that are not part of the text network, are made from the config, or are only for drafting tokens (mtp),
# which `drafting_tensors` reads.
# Ollama's files have the networks for images ("v", "mm") and sounds ("a") beside the text network.
_SKIPPED_GGUF = re.compile(r"(v|mm|a)\.|rope_(freqs|factors_long|factors_short)\.weight")
_SKIPPED = re.compile(
    r"(model\.)?(vision_tower|vision_model|visual|audio_tower|embed_audio|multi_modal_projector|embed_vision|vision_adapter|vision_projection|mtp)\.|.*\.(rotary_emb\.inv_freq|att(ention|n)\.(masked_)?bias)$"
)
_PADDED = {"roberta": 2, "xlm-roberta": 2}  # rows in the table of positions before the first token's row

# BERT, ELECTRA, RoBERTa; DistilBERT; Nomic's BERT (published files, then transformers' class); ModernBERT.
_MODELS = "bert|distilbert|electra|nomic_bert|roberta|model"
_ENCODER_PARTS = _compiled(
    (rf"^({_MODELS})\.(?=(embeddings|encoder|transformer|layers|final_norm|emb_ln|pooler)\b)", ""),
    (r"^((encoder|transformer)\.)?layers?\.([0-9]+)\.", r"model.layers.\3."),
    (r"\.attention\.(self\.query|q_lin)\.", ".self_attn.q_proj."),
    (r"\.attention\.(self\.key|k_lin)\.", ".self_attn.k_proj."),
    (r"\.attention\.(self\.value|v_lin)\.", ".self_attn.v_proj."),
    (r"\.attn\.Wqkv\.", ".self_attn.qkv_proj."),
    (r"\.(attention\.(output\.dense|out_lin)|attn\.(out_proj|Wo))\.", ".self_attn.o_proj."),
    (r"\.(attention\.output\.LayerNorm|sa_layer_norm|norm1|post_attention_layernorm)\.", ".post_attention_norm."),
    (r"\.(intermediate\.dense|ffn\.lin1|mlp\.fc11)\.", ".mlp.up_proj."),
    (r"\.mlp\.fc12\.", ".mlp.gate_proj."),
    (r"\.mlp\.Wi\.", ".mlp.gate_up_proj."),
    (r"\.(output\.dense|ffn\.lin2|mlp\.(fc2|Wo))\.", ".mlp.down_proj."),
    (r"\.(output\.LayerNorm|output_layer_norm|norm2|post_mlp_layernorm)\.", ".post_mlp_norm."),
    (r"^(model\.layers\.[0-9]+\.)attn_norm\.", r"\1attention_norm."),
    (r"^embeddings\.(word_embeddings|tok_embeddings)\.", "model.embed_tokens."),
    (r"^embeddings\.position_embeddings\.", "model.embed_positions."),
    (r"^embeddings\.token_type_embeddings\.", "model.embed_types."),
    (r"^(embeddings\.(LayerNorm|norm)|emb_ln)\.", "model.embed_norm."),
    (r"^final_norm\.", "model.norm."),
    (r"(LayerNorm|_norm)\.gamma$", r"\1.weight"),
    (r"(LayerNorm|_norm)\.beta$", r"\1.bias"),
)
# Heads that guess words, which files have in addition to the encoder; classifiers have other names.
_SKIPPED_HEADS = re.compile(
    r"(cls\.|lm_head\.|decoder\.|vocab_\w+\.|(discriminator|generator)_\w+\.)|.*\.position_ids|.*\.inv_freq"
)


def names_from_gguf(names: Iterable[str], own: Mapping[str, str] = _USUAL) -> dict[str, str]:
    """Return our name for each name in the file, without tensors that are not weights.

    `own` has GGUF's names of modules by ours, if the architecture has unusual ones.
    """
    modules = _GGUF_MODULES | {theirs: ours for ours, theirs in own.items()}
    usual = {name: name for name in names if not _SKIPPED_GGUF.match(name)}
    for name in [name for name in usual if name.endswith(".ssm_conv1d.weight")]:
        for which in ("qkv", "gate"):
            fused = name.replace(".ssm_conv1d.", f".attn_{which}.")
            usual |= {fused: fused.replace(".attn_", ".linear_attn_")} if fused in usual else {}
    known = _GGUF_LAYER, "model.layers.", _GGUF_VECTOR, modules
    return {name: _translated(alias, *known) or alias for name, alias in usual.items()}


def name_in_gguf(name: str, own: Mapping[str, str]) -> str | None:
    """Return the name of one of our tensors in a GGUF file, or None if there is none.

    It is the inverse of `names_from_gguf`. Stacks of experts have the names of `fused_tensors`, without a number.
    """
    return _translated(name, _OUR_LAYER, "blk.", _VECTOR_IN_GGUF, {**_MODULE_IN_GGUF, **own})


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
    norms = _NORMS_OF_FOUR if _layer_of(name) in with_four else _NORMS
    name = _replaced(name, _PARTS)
    return _NORM_PATTERN.sub(lambda match: match[1] + norms.get(match[2], match[2]) + match[3], name)


def _replaced(name: str, parts: Iterable[tuple[re.Pattern[str], str]]) -> str:
    for pattern, ours in parts:
        name = pattern.sub(ours, name)
    return name


def is_norm(name: str) -> bool:
    """Return True if one of our names is the weight of a norm, except the norm in a gated delta net."""
    return name.endswith("norm.weight") and not name.endswith(".linear_attn.norm.weight")


def _translated(
    name: str, layer: re.Pattern[str], prefix: str, vectors: Mapping[str, str], modules: Mapping[str, str]
) -> str | None:
    """Return a name in the other notation, or None. The name of a layer gets this prefix and the layer's number."""
    match = layer.fullmatch(name)
    at, rest = ("", name) if match is None else (f"{prefix}{match[1]}.", match[2])
    if match is not None and (vector := vectors.get(rest)) is not None:
        return f"{at}{vector}"
    module, _, kind = rest.rpartition(".")
    return f"{at}{modules[module]}.{kind}" if module in modules and kind in ("weight", "bias") else None


def _without_prefix(name: str) -> str:
    if name.startswith(("gpt_neox.", "embed_out.")):
        for theirs, ours in _NEOX.items():
            name = name.replace(theirs, ours)
    name = name.removeprefix("transformer.")
    first = f"{name.partition('.')[0]}."
    if first in _GPT:
        return _GPT[first] + name.removeprefix(first)
    if _WITHOUT_MODEL.match(name):
        return f"model.{name}"
    text = _TEXT_PREFIX.sub("model.", name, count=1) if _TEXT_PREFIX.match(name) else name
    return text.removeprefix("language_model.") if text.startswith("language_model.lm_head.") else text


def encoder_names(names: Iterable[str]) -> dict[str, str]:
    """Return our name for each name in the file, without heads that guess hidden words."""
    return {name: _replaced(name, _ENCODER_PARTS) for name in names if not _SKIPPED_HEADS.match(name)}


def without_padded_positions(tensors: dict[str, TensorInfo], config: Mapping[str, Any]) -> dict[str, TensorInfo]:
    """Return an encoder's tensors with a table of positions that begins at a text's first token."""
    num_padded, name = _PADDED.get(str(config.get("model_type")), 0), "model.embed_positions.weight"
    table = tensors.get(name)
    if not num_padded or table is None or table.shape[0] <= num_padded:
        return tensors
    return {**tensors, name: table.rows(range(num_padded, table.shape[0]))}


def without_poolers(tensors: dict[str, TensorInfo]) -> dict[str, TensorInfo]:
    """Return an encoder's tensors without the head that some have for training, after classifiers took theirs."""
    return {name: info for name, info in tensors.items() if not name.startswith(("pooler.", "head."))}


_MOST_LAYERS = 64
_LAYER = re.compile(r"(?:((model|language_model)\.)*layers|blk)\.([0-9]+)\.(.+)")
_MTP = re.compile(r"(?:model\.)?mtp\.(layers\.0\.|fc|pre_fc_norm_embedding|pre_fc_norm_hidden|norm)(.+)")
_OF_MTP = {"fc": "eh_proj", "pre_fc_norm_embedding": "enorm", "pre_fc_norm_hidden": "hnorm", "norm": "shared_head.norm"}
_AT = "model.layers.0."
DRAFTING_NORM = f"{_AT}shared_head.norm.weight"  # the last norm of a layer that drafts, in files
LAST_NORM = "model.norm.weight"  # its name here

Tensors = Mapping[str, TensorInfo]


def own_tensors(tensors: Tensors, config: Mapping[str, Any]) -> dict[str, TensorInfo]:
    """Return the tensors without those of layers that only draft tokens, which follow the network's own layers."""
    indices = _drafting_layers(config)
    return {name: info for name, info in tensors.items() if not indices or _index_of(name) not in indices}


def drafting_tensors(
    tensors: Tensors, config: Mapping[str, Any], read: Callable[[Tensors], dict[str, TensorInfo]]
) -> dict[str, TensorInfo]:
    """Return the tensors of the first layer that only drafts tokens.

    `read` makes our names and undoes a format's changes. The result is empty if there is no such layer, or if it raises
    ModelError: the model runs without its head.
    """
    layer, indices = dict[str, TensorInfo](), _drafting_layers(config)
    for name, info in tensors.items():
        if (match := _MTP.fullmatch(name)) is not None:
            layer[_AT + _OF_MTP.get(match[1], "") + match[2]] = info
        elif indices and _index_of(name) == indices[0]:
            layer[_AT + name.split(f".{indices[0]}.", 1)[1]] = info
    try:
        named = read(layer)
    except ModelError:
        return {}
    return {LAST_NORM if name == DRAFTING_NORM else name: info for name, info in named.items()}


def _drafting_layers(config: Mapping[str, Any]) -> range:
    first, count = config.get("num_hidden_layers"), config.get("num_nextn_predict_layers")
    if type(first) is not int or type(count) is not int or not 0 < count <= _MOST_LAYERS:
        return range(0)
    return range(first, first + count)


def _index_of(name: str) -> int:
    """Return the index of the layer that has a tensor, in a file's names or in ours, or -1 if none has it."""
    match = _LAYER.fullmatch(name)
    return -1 if match is None else int(match[3])
