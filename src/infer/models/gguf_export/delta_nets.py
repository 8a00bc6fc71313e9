"""Tensors of gated delta nets in the forms of GGUF, as llama.cpp's converter writes them.

Decays are stored directly, not as logarithms. Files of Qwen3-Next fuse b and a by key heads. In files of Qwen3.5,
neighbouring value heads belong to different key heads.
"""

import numpy as np

from infer.compute.operands.mixers import GatedDeltaNet
from infer.models.gguf_export.rows import Order, Rows, joined, reordered, vector_of, with_columns

WITH_ONE_BA = "qwen3next"  # its files have our order of value heads
DELTA_NET_OUTPUT = "ssm_out.weight"  # its name within a layer


def change_delta_net(named: dict[str, Rows], name: str, prefix: str, mixer: GatedDeltaNet) -> None:
    """Give one layer's tensors the form of this architecture's files.

    Args:
        named: The model's tensors by our names. The tensors of the layer are changed.
        name: The architecture's name in GGUF.
        prefix: The beginning of the names of the layer's tensors.
        mixer: The layer's delta net.
    """
    if mixer.is_decay_log:
        decay = named[f"{prefix}decay"]
        named[f"{prefix}decay"] = vector_of(-decay.read(0, decay.count).exp())
    key_heads, value_heads = mixer.num_key_heads, mixer.num_value_heads
    if name == WITH_ONE_BA:
        b, a = (named.pop(f"{prefix}{part}_proj.weight") for part in "ba")
        order = np.arange(2 * value_heads).reshape(2, key_heads, -1).swapaxes(0, 1).reshape(-1)
        named[f"{prefix}ba_proj.weight"] = reordered(joined([b, a]), order)
        return
    heads, features = _tiled(mixer, 1), _tiled(mixer, mixer.value_dim)
    channels = np.arange(mixer.num_channels)
    first = mixer.num_channels - mixer.value_features
    channels[first:] = first + features
    orders = {"b_proj.weight": heads, "a_proj.weight": heads, "decay": heads, "dt_bias": heads}
    orders |= {"z_proj.weight": features, "qkv_proj.weight": channels, "taps": channels}
    for part, order in orders.items():
        named[prefix + part] = reordered(named[prefix + part], order)
    named[f"{prefix}out_proj.weight"] = with_columns(named[f"{prefix}out_proj.weight"], output_columns(name, mixer))


def output_columns(name: str, mixer: GatedDeltaNet) -> Order:
    """Return, for each column of the output's matrix in files of this architecture, the number of our column."""
    return np.arange(mixer.value_features) if name == WITH_ONE_BA else _tiled(mixer, mixer.value_dim)


def _tiled(mixer: GatedDeltaNet, size: int) -> Order:
    """Return the order of the value heads' rows, `size` per head.

    In it, head h belongs to key head h mod the number of key heads.
    """
    rows = np.arange(mixer.num_value_heads * size).reshape(mixer.num_key_heads, -1, size)
    return rows.swapaxes(0, 1).reshape(-1)
