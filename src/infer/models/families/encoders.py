"""Configs of encoders → `Architecture`: BERT, DistilBERT, ELECTRA, RoBERTa and XLM-R, Nomic's BERT, ModernBERT.

They share no defaults with decoders, so each family is a function. Defaults are those of Hugging Face.
"""

from collections.abc import Callable, Mapping
from typing import Any

from infer.compute.operands.architecture import Architecture, Layer, Norms, TextInputs
from infer.compute.operands.feed_forwards import Dense
from infer.compute.operands.mixers import Attention, Rope
from infer.errors import ModelError, UnsupportedModelError
from infer.models.families.config_values import Config, choice, count, flag, optional_count, positive, settings
from infer.models.families.layer_kinds import FULL, SLIDING
from infer.models.families.widths import ACTIVATIONS, head_dim_of, num_layers_of

_POST_NORMS = Norms(before=False, of_sum=True, are_centred=True, have_bias=True)
_DISTILBERT_NAMES = {
    "dim": "hidden_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "hidden_dim": "intermediate_size",
    "activation": "hidden_act",
}
_NOMIC_NAMES = {
    "n_embd": "hidden_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_inner": "intermediate_size",
    "n_positions": "max_position_embeddings",
    "layer_norm_epsilon": "layer_norm_eps",
    "activation_function": "hidden_act",
}
_PADDED = 2  # unused first positions in RoBERTa's tables, up to the position of padding


def bert(config: Config) -> Architecture:
    """Return BERT: learned positions and types, norms of sums."""
    return _bert({"max_position_embeddings": 512, "type_vocab_size": 2, "layer_norm_eps": 1e-12, **config}, 0)


def distilbert(config: Config) -> Architecture:
    """Return DistilBERT: BERT without types, and with other names of settings."""
    return bert({**_renamed(config, _DISTILBERT_NAMES), "type_vocab_size": 0})


def electra(config: Config) -> Architecture:
    """Return ELECTRA: BERT. A matrix between a narrower embedding and the first layer is not supported."""
    width = config.get("embedding_size", 128)
    if width != config.get("hidden_size"):
        raise UnsupportedModelError(
            f"embedding_size={width!r:.40} is not supported for electra: it must be hidden_size, "
            f"{config.get('hidden_size')!r:.40}"
        )
    return bert(config)


def roberta(config: Config) -> Architecture:
    """Return RoBERTa or XLM-R: BERT whose first two positions are for padding."""
    defaults = {"max_position_embeddings": 512, "type_vocab_size": 2, "layer_norm_eps": 1e-12, "pad_token_id": 1}
    config = {**defaults, **config}
    if config["pad_token_id"] != _PADDED - 1:
        raise UnsupportedModelError(f"pad_token_id={config['pad_token_id']!r:.40} is not supported: it must be 1")
    return _bert(config, _PADDED)


def _bert(config: Config, num_padded: int) -> Architecture:
    kind = config.get("position_embedding_type") or "absolute"
    if kind != "absolute":
        raise UnsupportedModelError(f"position_embedding_type={kind!r:.40} is not supported: it must be 'absolute'")
    if config.get("is_decoder"):
        raise UnsupportedModelError("is_decoder=true is not supported for this family: use an encoder")
    activation = choice({"hidden_act": "gelu", **config}, "hidden_act", ACTIVATIONS)
    attention = _attention(config, None, has_bias=True)
    dense = Dense(count(config, "intermediate_size"), activation, has_bias=True, is_gated=False)
    num_positions = count(config, "max_position_embeddings") - num_padded
    if num_positions < 1:
        raise ModelError(f"max_position_embeddings must be more than {num_padded}, got {num_positions + num_padded}")
    inputs = TextInputs(num_positions, _num_types(config))
    return _architecture(config, [attention] * num_layers_of(config), dense, _POST_NORMS, inputs, num_positions)


def nomic_bert(config: Config) -> Architecture:
    """Return Nomic's BERT: types, but rotated positions; a gated feed-forward; no biases except in norms."""
    config = _with_usual_names(config)
    for name in ("prenorm", "causal", "rotary_emb_interleaved", "use_rms_norm"):
        if config.get(name) not in (False, None):
            raise UnsupportedModelError(f"{name}={config[name]!r:.40} is not supported for nomic_bert")
    if config.get("rotary_scaling_factor") is not None:
        raise UnsupportedModelError("rotary_scaling_factor is not supported for nomic_bert: leave it out")
    given = settings(config, "rope_parameters")
    theta = positive({"rope_theta": 1000.0, **given}, "rope_theta")
    part = {"rotary_emb_fraction": 1.0, **config}
    rope = Rope(theta, int(head_dim_of(config) * positive(part, "rotary_emb_fraction")))
    has_bias = flag(config, "qkv_proj_bias")
    attention = _attention(config, rope, has_bias=has_bias)
    activation = choice({"hidden_act": "silu", **config}, "hidden_act", {**ACTIVATIONS, "swiglu": "silu"})
    dense = Dense(count(config, "intermediate_size"), activation, has_bias=flag(config, "mlp_fc1_bias"))
    inputs = TextInputs(num_types=_num_types(config))
    return _architecture(config, [attention] * num_layers_of(config), dense, _POST_NORMS, inputs)


def _with_usual_names(config: Config) -> dict[str, Any]:
    """Return a config with the names of transformers' own class; published files have older names."""
    usual = _renamed(config, _NOMIC_NAMES)
    if (base := config.get("rotary_emb_base")) is not None:
        usual["rope_parameters"] = {"rope_theta": base}
    return {"layer_norm_eps": 1e-12, "max_position_embeddings": 2048, **usual}


def _renamed(config: Config, names: Mapping[str, str]) -> dict[str, Any]:
    """Return a config whose settings have usual names. The family's own names take precedence over usual ones."""
    usual = {name: value for name, value in config.items() if name not in names}
    return usual | {names[name]: value for name, value in config.items() if name in names}


def _num_types(config: Config) -> int:
    return 0 if config.get("type_vocab_size") == 0 else count(config, "type_vocab_size", default=2)


def modernbert(config: Config) -> Architecture:
    """Return ModernBERT: norms before parts, windows in most layers, a gated feed-forward."""
    config = {"max_position_embeddings": 8192, "layer_norm_eps": 1e-5, "local_attention": 128, **config}
    config["layer_norm_eps"] = config.get("norm_eps", config["layer_norm_eps"])
    norms = Norms(are_centred=True, have_bias=flag(config, "norm_bias"))
    has_bias, kinds = flag(config, "attention_bias"), _modernbert_kinds(config)
    thetas = {FULL: 160_000.0, SLIDING: 10_000.0}
    for kind, name in ((FULL, "global_rope_theta"), (SLIDING, "local_rope_theta")):
        own = settings(settings(config, "rope_parameters"), kind)
        if own.get("rope_type", "default") != "default":
            raise UnsupportedModelError(f"rope_type={own['rope_type']!r:.40} is not supported for modernbert")
        thetas[kind] = positive({"rope_theta": config.get(name) or thetas[kind], **own}, "rope_theta")
    by_kind = {
        kind: _attention(
            config,
            Rope(thetas[kind], head_dim_of(config)),
            has_bias=has_bias,
            window=count(config, "local_attention") // 2 + 1 if kind == SLIDING else None,
        )
        for kind in set(kinds)
    }
    activation = choice({"hidden_activation": "gelu", **config}, "hidden_activation", ACTIVATIONS)
    dense = Dense(count(config, "intermediate_size"), activation, has_bias=flag(config, "mlp_bias"))
    return _architecture(config, [by_kind[kind] for kind in kinds], dense, norms, TextInputs())


def _modernbert_kinds(config: Config) -> list[str]:
    given, num_layers = config.get("layer_types"), num_layers_of(config)
    if given is None:
        every = count(config, "global_attn_every_n_layers", default=3)
        return [SLIDING if layer % every else FULL for layer in range(num_layers)]
    if not isinstance(given, list) or len(given) != num_layers or not set(given) <= {FULL, SLIDING}:
        raise ModelError(f"layer_types must list {num_layers} times {FULL} or {SLIDING}, got {given!r:.80}")
    return given


def _attention(config: Config, rope: Rope | None, *, has_bias: bool, window: int | None = None) -> Attention:
    head_dim, heads = head_dim_of(config), count(config, "num_attention_heads")
    return Attention(
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=head_dim,
        rope=rope,
        scale=head_dim**-0.5,
        window=window,
        has_qkv_bias=has_bias,
        has_output_bias=has_bias,
        is_causal=False,
    )


def _architecture(
    config: Config,
    mixers: list[Attention],
    dense: Dense,
    norms: Norms,
    inputs: TextInputs,
    max_positions: int | None = None,
) -> Architecture:
    # ModernBERT's first mixer reads the embeddings, which were just normalised.
    first = Norms(norms.before, are_centred=True, have_bias=norms.have_bias, skip_mixer=True)
    layers = [
        Layer(mixer, dense, first if norms.before and index == 0 else norms) for index, mixer in enumerate(mixers)
    ]
    return Architecture(
        family=str(config["model_type"]),
        vocab_size=count(config, "vocab_size"),
        hidden_size=count(config, "hidden_size"),
        layers=tuple(layers),
        norm_eps=positive(config, "layer_norm_eps"),
        max_positions=max_positions or count(config, "max_position_embeddings"),
        tied_embeddings=True,
        text_inputs=inputs,
        has_last_norm=norms.before,
        text_limit=optional_count(config, "text_limit"),
    )


ENCODERS: Mapping[str, Callable[[Config], Architecture]] = {
    "bert": bert,
    "distilbert": distilbert,
    "electra": electra,
    "roberta": roberta,
    "xlm-roberta": roberta,
    "nomic_bert": nomic_bert,
    "modernbert": modernbert,
}
