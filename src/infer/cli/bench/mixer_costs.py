"""Costs of the mixers of a step, by their names in a profile: bytes of the cache, and operations.

Only operations of products count: a multiplication with its addition counts as two. Scales, exponentials, gates and
norms are not counted.
"""

from collections import Counter

from infer.compute.kvcache.page_sizes import read_bytes
from infer.compute.operands.architecture import Architecture
from infer.compute.operands.limits import STATE_TOKENS
from infer.compute.operands.mixers import Attention, GatedDeltaNet, Mixer, ShortConv

_FLOAT_BYTES = 4


def mixer_bytes(architecture: Architecture, kv_type: str, context: int) -> Counter[str]:
    """Return the bytes of the cache that a decode step after `context` tokens moves, by kind.

    Layers with a state count the bytes that they read and the bytes that they write. Attention counts only reads.
    """
    found = Counter[str]()
    for mixer in architecture.mixers:
        if isinstance(mixer, Attention):
            found["attend"] += read_bytes(mixer, kv_type, context)
        elif isinstance(mixer, GatedDeltaNet):
            found["delta_net"] += _delta_net_bytes(mixer, context)
        else:
            found["conv"] += _FLOAT_BYTES * mixer.num_channels * (_num_inputs(mixer, context) + 1)
    return found


def mixer_flops(architecture: Architecture, num_tokens: int, context: int) -> Counter[str]:
    """Return a token's share of the operations of a step of `num_tokens` tokens after `context` others, by kind."""
    found = Counter[str]()
    positions = range(context, context + num_tokens)
    for mixer in architecture.mixers:
        kind = "attend" if isinstance(mixer, Attention) else "conv" if isinstance(mixer, ShortConv) else "delta_net"
        found[kind] += sum(_flops(mixer, position) for position in positions) // num_tokens
    return found


def _num_inputs(mixer: ShortConv | GatedDeltaNet, position: int) -> int:
    """Return the number of earlier tokens whose inputs a convolution reads."""
    return min(position, mixer.num_taps - 1)


def _state_size(net: GatedDeltaNet) -> int:
    return net.num_value_heads * net.key_dim * net.value_dim


def _delta_net_bytes(net: GatedDeltaNet, position: int) -> int:
    """Return the bytes that the token at a position reads and writes.

    The token reads a state, the log of the page's earlier tokens (k, u and log α), and inputs of the convolution. It
    writes its own input and log entry. The first token of a page reads the state and the whole log of the previous
    page, and writes a state.
    """
    place = position % STATE_TOKENS
    entry = net.num_key_heads * net.key_dim + net.value_features + net.num_value_heads
    read = _num_inputs(net, position) * net.num_channels
    read += (_state_size(net) if position else 0) + (place or min(position, STATE_TOKENS)) * entry
    written = net.num_channels + entry + (0 if place else _state_size(net))
    return _FLOAT_BYTES * (read + written)


def _flops(mixer: Mixer, position: int) -> int:
    """Return the operations of the token at a position."""
    if isinstance(mixer, Attention):
        num_seen = position + 1 if mixer.window is None else min(position + 1, mixer.window)
        num_seen = num_seen if mixer.chunk is None else position % mixer.chunk + 1
        return 4 * mixer.num_heads * mixer.head_dim * num_seen
    convolution = 2 * mixer.num_taps * mixer.num_channels
    return convolution if isinstance(mixer, ShortConv) else convolution + _delta_rule_flops(mixer, position)


def _delta_rule_flops(net: GatedDeltaNet, position: int) -> int:
    """Return the operations of k and q with the state and with the keys of the log, and of the log's u with both
    results.

    k is multiplied by the keys before its own, and q also by its own. The first token of a page adds the log of the
    previous page to a state.
    """
    place = position % STATE_TOKENS
    with_log = 2 * (2 * place + 1)
    flops = 4 * _state_size(net)
    flops += with_log * (net.num_key_heads * net.key_dim + net.value_features)
    return flops + (2 * STATE_TOKENS * _state_size(net) if position and not place else 0)
