"""Config → the sizes of a network, and the activation functions by their names."""

from infer.compute.operands.feed_forwards import Activation
from infer.errors import ModelError
from infer.models.families.config_values import Config, count, flag, positive

_MAX_LAYERS, _MAX_HEAD_DIM = 1024, 2**16
_NAMES: dict[Activation, tuple[str, ...]] = {  # in configs
    "silu": ("silu", "swish"),
    "gelu": ("gelu", "gelu_python"),
    "gelu_tanh": ("gelu_new", "gelu_fast", "gelu_accurate", "gelu_pytorch_tanh", "gelu_python_tanh"),
    "gelu_sigmoid": ("quick_gelu",),
    "relu": ("relu",),
    "relu_squared": ("relu2",),
}
ACTIVATIONS = {name: activation for activation, names in _NAMES.items() for name in names}


def num_layers_of(config: Config) -> int:
    return count(config, "num_hidden_layers", maximum=_MAX_LAYERS)


def head_dim_of(config: Config) -> int:
    """Return the size of a head: the config's, or an equal part of the residual stream."""
    if config.get("head_dim") is not None:
        return count(config, "head_dim", maximum=_MAX_HEAD_DIM)
    hidden_size, num_heads = count(config, "hidden_size"), count(config, "num_attention_heads")
    if hidden_size % num_heads:
        raise ModelError(f"hidden_size={hidden_size} must be a multiple of num_attention_heads={num_heads}")
    head_dim = {"hidden_size / num_attention_heads": hidden_size // num_heads}
    return count(head_dim, *head_dim, maximum=_MAX_HEAD_DIM)


def intermediate_size(config: Config) -> int:
    return count(config, "intermediate_size")


def four_times_hidden(config: Config) -> int:
    """Return the given size, or four times that of the residual stream."""
    return count(config, "intermediate_size", default=4 * count(config, "hidden_size"))


def llama4_size(config: Config) -> int:
    return count(config, "intermediate_size_mlp")


def lfm2_size(config: Config) -> int:
    """Return LFM2's size: with `block_auto_adjust_ff_dim`, two thirds of the given size, multiplied and rounded up."""
    size = count(config, "intermediate_size")
    if not flag(config, "block_auto_adjust_ff_dim"):
        return size
    size = int(2 * size / 3)
    if config.get("block_ffn_dim_multiplier") is not None:  # without a multiplier, the size is not rounded
        size = int(positive(config, "block_ffn_dim_multiplier") * size)
        unit = count(config, "block_multiple_of")
        size = -(-size // unit) * unit
    return count({"intermediate_size, adjusted,": size}, "intermediate_size, adjusted,")
