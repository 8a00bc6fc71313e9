"""Names of encoders' tensors → our names, as in `tensor_names`."""

import re
from collections.abc import Iterable, Mapping
from typing import Any

from infer.files.tensors.fused_tensors import rows_between
from infer.files.tensors.tensor_info import TensorInfo

_PADDED = {"roberta": 2, "xlm-roberta": 2}  # rows in the table of positions before the first token's row

# BERT, ELECTRA, RoBERTa; DistilBERT; Nomic's BERT (published files, then transformers' class); ModernBERT.
_MODELS = "bert|distilbert|electra|nomic_bert|roberta|model"
_PARTS = tuple(
    (re.compile(pattern), ours)
    for pattern, ours in (
        (rf"^({_MODELS})\.(?=(embeddings|encoder|transformer|layers|final_norm|emb_ln|pooler)\b)", ""),
        (r"^((encoder|transformer)\.)?layers?\.([0-9]+)\.", r"model.layers.\3."),
        (r"^(model\.layers\.[0-9]+\.)attention\.self\.(query|key|value)\.", r"\1self_attn.\2."),
        (r"\.self_attn\.query\.", ".self_attn.q_proj."),
        (r"\.self_attn\.key\.", ".self_attn.k_proj."),
        (r"\.self_attn\.value\.", ".self_attn.v_proj."),
        (r"\.attention\.output\.dense\.", ".self_attn.o_proj."),
        (r"\.attention\.output\.LayerNorm\.", ".post_attention_norm."),
        (r"\.intermediate\.dense\.", ".mlp.up_proj."),
        (r"^(model\.layers\.[0-9]+\.)output\.dense\.", r"\1mlp.down_proj."),
        (r"^(model\.layers\.[0-9]+\.)output\.LayerNorm\.", r"\1post_mlp_norm."),
        (r"\.attention\.([qkv])_lin\.", r".self_attn.\1_proj."),
        (r"\.attention\.out_lin\.", ".self_attn.o_proj."),
        (r"\.sa_layer_norm\.", ".post_attention_norm."),
        (r"\.ffn\.lin1\.", ".mlp.up_proj."),
        (r"\.ffn\.lin2\.", ".mlp.down_proj."),
        (r"\.output_layer_norm\.", ".post_mlp_norm."),
        (r"\.attn\.Wqkv\.", ".self_attn.qkv_proj."),
        (r"\.attn\.(out_proj|Wo)\.", ".self_attn.o_proj."),
        (r"\.mlp\.fc11\.", ".mlp.up_proj."),
        (r"\.mlp\.fc12\.", ".mlp.gate_proj."),
        (r"\.mlp\.fc2\.", ".mlp.down_proj."),
        (r"\.mlp\.Wi\.", ".mlp.gate_up_proj."),
        (r"\.mlp\.Wo\.", ".mlp.down_proj."),
        (r"^(model\.layers\.[0-9]+\.)attn_norm\.", r"\1attention_norm."),
        (r"^(model\.layers\.[0-9]+\.)(norm1|post_attention_layernorm)\.", r"\1post_attention_norm."),
        (r"^(model\.layers\.[0-9]+\.)(norm2|post_mlp_layernorm)\.", r"\1post_mlp_norm."),
        (r"^embeddings\.(word_embeddings|tok_embeddings)\.", "model.embed_tokens."),
        (r"^embeddings\.position_embeddings\.", "model.embed_positions."),
        (r"^embeddings\.token_type_embeddings\.", "model.embed_types."),
        (r"^(embeddings\.(LayerNorm|norm)|emb_ln)\.", "model.embed_norm."),
        (r"^final_norm\.", "model.norm."),
        (r"(LayerNorm|_norm)\.gamma$", r"\1.weight"),
        (r"(LayerNorm|_norm)\.beta$", r"\1.bias"),
    )
)
# Heads that guess words, which files have in addition to the encoder; classifiers have other names.
_SKIPPED = re.compile(
    r"(cls\.|lm_head\.|decoder\.|vocab_\w+\.|(discriminator|generator)_\w+\.)|.*\.position_ids|.*\.inv_freq"
)


def encoder_names(names: Iterable[str]) -> dict[str, str]:
    """Return our name for each name in the file, without heads that guess hidden words."""
    found: dict[str, str] = {}
    for name in names:
        if _SKIPPED.match(name):
            continue
        ours = name
        for pattern, replacement in _PARTS:
            ours = pattern.sub(replacement, ours)
        found[name] = ours
    return found


def without_padded_positions(tensors: dict[str, TensorInfo], config: Mapping[str, Any]) -> dict[str, TensorInfo]:
    """Return an encoder's tensors with a table of positions that begins at a text's first token."""
    num_padded, name = _PADDED.get(str(config.get("model_type")), 0), "model.embed_positions.weight"
    table = tensors.get(name)
    if not num_padded or table is None or table.shape[0] <= num_padded:
        return tensors
    return {**tensors, name: rows_between(table, num_padded, table.shape[0])}


def without_poolers(tensors: dict[str, TensorInfo]) -> dict[str, TensorInfo]:
    """Return an encoder's tensors without the head that some have for training, after classifiers took theirs."""
    return {name: info for name, info in tensors.items() if not name.startswith(("pooler.", "head."))}
