"""Config → mixers that keep a state, for the families that have them."""

from infer.model.families.config_values import Config, count, flag
from infer.operands.architecture import ShortConv

_MAX_TAPS = 64  # a page of the cache covers as many positions


def short_conv(config: Config) -> ShortConv:
    """Return the convolution of LFM2, whose channels are those of the residual stream."""
    num_taps = count(config, "conv_L_cache", maximum=_MAX_TAPS)
    return ShortConv(count(config, "hidden_size"), num_taps, has_bias=flag(config, "conv_bias"))
