"""Config → mixers that keep a state, for the families that have them."""

from dataclasses import replace

from infer.compute.operands.mixers import GatedDeltaNet, ShortConv
from infer.errors import ModelError, UnsupportedModelError
from infer.models.families.config_values import Config, count, flag

_MAX_TAPS = 64  # because a page of the cache covers this many positions
_MAX_HEADS, _MAX_HEAD_DIM = 4096, 4096


def short_conv(config: Config) -> ShortConv:
    """Return the convolution of LFM2, which has the channels of the residual stream."""
    num_taps = count(config, "conv_L_cache", maximum=_MAX_TAPS)
    return ShortConv(count(config, "hidden_size"), num_taps, has_bias=flag(config, "conv_bias"))


def gated_delta_net(config: Config) -> GatedDeltaNet:
    """Return the linear attention of Qwen3-Next and Qwen3.5.

    Only GGUF files have the settings `linear_decay_is_log` and `linear_value_heads_are_tiled`.
    """
    if config["hidden_act"] not in ("silu", "swish"):
        refused = f"hidden_act {config['hidden_act']!r:.60}"
        raise UnsupportedModelError(f"{refused} is not supported for {config['model_type']}: it must be 'silu'")
    num_key_heads = count(config, "linear_num_key_heads", maximum=_MAX_HEADS)
    num_value_heads = count(config, "linear_num_value_heads", maximum=_MAX_HEADS)
    if num_value_heads % num_key_heads:
        rule = f"must be a multiple of linear_num_key_heads={num_key_heads}"
        raise ModelError(f"config: linear_num_value_heads={num_value_heads} {rule}")
    return GatedDeltaNet(
        num_key_heads=num_key_heads,
        num_value_heads=num_value_heads,
        key_dim=count(config, "linear_key_head_dim", maximum=_MAX_HEAD_DIM),
        value_dim=count(config, "linear_value_head_dim", maximum=_MAX_HEAD_DIM),
        num_taps=count(config, "linear_conv_kernel_dim", maximum=_MAX_TAPS),
        is_decay_log=flag({"linear_decay_is_log": True, **config}, "linear_decay_is_log"),
        are_heads_tiled=flag(config, "linear_value_heads_are_tiled"),
    )


def olmo_hybrid_delta_net(config: Config) -> GatedDeltaNet:
    """Return the linear attention of OLMo-hybrid. Missing sizes are derived from those of attention."""
    num_heads = count(config, "num_attention_heads")
    num_key_heads = count(config, "linear_num_key_heads", default=num_heads)
    usual_dim = int(0.75 * count(config, "hidden_size") / num_key_heads)
    key_dim = count(config, "linear_key_head_dim", default=usual_dim)
    sizes = {"linear_num_key_heads": num_key_heads, "linear_key_head_dim": key_dim}
    sizes |= {"linear_num_value_heads": num_heads, "linear_value_head_dim": 2 * key_dim}
    found = gated_delta_net({**config, **{name: size for name, size in sizes.items() if config.get(name) is None}})
    scale = 2.0 if flag(config, "linear_allow_neg_eigval") else 1.0
    return replace(found, are_parts_apart=True, beta_scale=scale, norm_eps=1e-5)
