"""Bytes of a page of the cache, for each kind of layer. Loads no torch."""

from math import prod

from infer.operands.architecture import Attention, GatedDeltaNet, Mixer
from infer.quantization.kv_formats import key_block_bytes, num_blocks, value_block_bytes

_FLOAT_BYTES = 4


def page_bytes(layer: Mixer, kv_type: str, page_tokens: int) -> int:
    """Return the bytes that a layer has in each page of `page_tokens` tokens."""
    if isinstance(layer, Attention):
        block = key_block_bytes(kv_type, layer.head_dim) + value_block_bytes(kv_type, layer.head_dim)
        return num_blocks(page_tokens) * layer.num_kv_heads * block
    if isinstance(layer, GatedDeltaNet):
        return _FLOAT_BYTES * sum(map(prod, layer.page_shapes(page_tokens)))
    return _FLOAT_BYTES * page_tokens * layer.num_channels
