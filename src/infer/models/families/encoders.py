"""Encoders as rows of a table: BERT, DistilBERT, ELECTRA, RoBERTa and XLM-R, Nomic's BERT, ModernBERT.

Defaults are those of Hugging Face.
"""

from dataclasses import replace

from infer.compute.operands.architecture import Norms, TextInputs
from infer.errors import ModelError, UnsupportedModelError
from infer.models.families import layer_kinds as kinds
from infer.models.families import ropes
from infer.models.families.config_values import Config, count, flag
from infer.models.families.family import GPT2_NAMES, Family, usual_defaults
from infer.models.families.widths import ACTIVATIONS

_PADDED = 2  # unused first positions in RoBERTa's tables, up to the position of padding


def _types(config: Config) -> TextInputs:
    return TextInputs(num_types=0 if config["type_vocab_size"] == 0 else count(config, "type_vocab_size"))


def _positions_and_types(config: Config) -> TextInputs:
    return replace(_types(config), num_positions=count(config, "max_position_embeddings"))


def _positions_after_padding(config: Config) -> TextInputs:
    """Return the inputs of RoBERTa and XLM-R, whose first two positions are for padding."""
    num_positions = count(config, "max_position_embeddings")
    if num_positions <= _PADDED:
        raise ModelError(f"max_position_embeddings must be more than {_PADDED}, got {num_positions}")
    return replace(_types(config), num_positions=num_positions - _PADDED)


def _electra_inputs(config: Config) -> TextInputs:
    """Return ELECTRA's inputs. A matrix between a narrower embedding and the first layer is not supported."""
    width, hidden_size = config.get("embedding_size", 128), config.get("hidden_size")
    if width != hidden_size:
        raise UnsupportedModelError(
            f"embedding_size={width!r:.40} is not supported for electra: it must be hidden_size, {hidden_size!r:.40}"
        )
    return _positions_and_types(config)


def _window_of_both_sides(config: Config, kind: str, is_rotated: bool) -> Config:
    """Return ModernBERT's settings of layers. Its windows are counted over both sides of a token."""
    window = count(config, "local_attention") // 2 + 1
    return {**config, "sliding_window": window} if kind == kinds.SLIDING else config


_BIASES = frozenset({"attention_bias", "mlp_bias"})
_FIXED = {"tie_word_embeddings": True, "num_key_value_heads": None, "lm_head_bias": False}
_BERT = Family(
    usual_defaults(512, eps=1e-12, type_vocab_size=2) | {"hidden_act": "gelu"},
    fixed=_FIXED | {"attention_bias": True, "mlp_bias": True},
    reads=_BIASES,
    renamed={"layer_norm_eps": "rms_norm_eps"},
    refuses={"position_embedding_type": "absolute", "is_decoder": False},
    is_encoder=True,
    rotated_layers=kinds.none_rotated,
    is_gated=False,
    text_inputs=_positions_and_types,
    norms=Norms(before=False, of_sum=True, are_centred=True, have_bias=True),
)
_ROBERTA = replace(_BERT, refuses={**_BERT.refuses, "pad_token_id": _PADDED - 1}, text_inputs=_positions_after_padding)

ENCODERS: dict[str, Family] = {
    "bert": _BERT,
    "distilbert": replace(
        _BERT,
        fixed={**_BERT.fixed, "type_vocab_size": 0},
        renamed={**_BERT.renamed, "dim": "hidden_size", "n_layers": "num_hidden_layers"}
        | {"n_heads": "num_attention_heads", "hidden_dim": "intermediate_size", "activation": "hidden_act"},
    ),
    "electra": replace(_BERT, text_inputs=_electra_inputs),
    "roberta": _ROBERTA,
    "xlm-roberta": _ROBERTA,
    "nomic_bert": replace(
        _BERT,
        defaults=usual_defaults(2048, eps=1e-12, type_vocab_size=2, partial_rotary_factor=1.0),
        fixed=_FIXED,
        renamed={**_BERT.renamed, **GPT2_NAMES, "qkv_proj_bias": "attention_bias", "mlp_fc1_bias": "mlp_bias"}
        | {"rotary_emb_base": "rope_theta", "rotary_emb_fraction": "partial_rotary_factor"},
        refuses={"prenorm": False, "causal": False, "rotary_emb_interleaved": False, "use_rms_norm": False}
        | {"rotary_scaling_factor": None},
        rotated_layers=kinds.all_rotated,
        rope_settings=ropes.theta_rope(1000.0),
        activations={**ACTIVATIONS, "swiglu": "silu"},
        is_gated=True,
        text_inputs=_types,
    ),
    "modernbert": Family(
        usual_defaults(8192, eps=1e-5, local_attention=128) | {"hidden_activation": "gelu"},
        fixed=_FIXED,
        reads=_BIASES,
        renamed={"layer_norm_eps": "rms_norm_eps", "norm_eps": "rms_norm_eps"}
        | {"global_attn_every_n_layers": "sliding_window_pattern"}
        | {"global_rope_theta": "rope_theta", "local_rope_theta": "rope_local_base_freq"},
        is_encoder=True,
        layer_kinds=kinds.windowed_but_every_nth_from_the_first,
        of_kind=_window_of_both_sides,
        rope_settings=ropes.rope_by_kind(160_000.0, 10_000.0, is_flat=True),
        activation_name="hidden_activation",
        text_inputs=lambda config: TextInputs(),
        norms=lambda config: Norms(are_centred=True, have_bias=flag(config, "norm_bias")),
    ),
}
