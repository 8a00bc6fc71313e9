"""Bytes of a page of the cache, for each kind of layer. Loads no torch."""

from math import prod

from infer.compute.kvcache.pages import num_pages
from infer.compute.operands.limits import STATE_TOKENS
from infer.compute.operands.mixers import Attention, GatedDeltaNet, Mixer
from infer.compute.quantization.kv_formats import BLOCK_POSITIONS, key_block_bytes, num_blocks, value_block_bytes

_FLOAT_BYTES = 4
TEXT_PAGE_TOKENS = 64  # in pages of an encoder's texts


def page_bytes(layer: Mixer, kv_type: str, page_tokens: int) -> int:
    """Return the bytes that a layer has in each page of `page_tokens` tokens."""
    if isinstance(layer, Attention):
        block = key_block_bytes(kv_type, layer.head_dim) + value_block_bytes(kv_type, layer.head_dim)
        return num_blocks(page_tokens) * layer.num_kv_heads * block
    if isinstance(layer, GatedDeltaNet):
        return _FLOAT_BYTES * sum(map(prod, layer.page_shapes(page_tokens)))
    return _FLOAT_BYTES * page_tokens * layer.num_channels


def slot_bytes(layer: Attention, kv_type: str) -> int:
    """Return the bytes of one token's keys and values in a layer."""
    return page_bytes(layer, kv_type, BLOCK_POSITIONS) // BLOCK_POSITIONS


def read_bytes(layer: Mixer, kv_type: str, context: int) -> int:
    """Return the bytes of a layer's cache that a decode step reads after `context` tokens, if no policy evicts.

    A gated delta net reads a state, and on average half a page of its log.
    """
    if isinstance(layer, Attention):
        visible = context if layer.most_seen is None else min(context, layer.most_seen)
        return visible * slot_bytes(layer, kv_type)
    if isinstance(layer, GatedDeltaNet):
        _, state, keys, updates, _ = map(prod, layer.page_shapes(STATE_TOKENS))
        return _FLOAT_BYTES * (state + (keys + updates) // 2)
    return _FLOAT_BYTES * layer.num_channels * (layer.num_taps - 1)


def num_text_pages(num_texts: int, num_tokens: int) -> int:
    """Return the number of pages for texts with `num_tokens` tokens in total."""
    return num_pages(num_tokens, TEXT_PAGE_TOKENS) + num_texts


def text_cache_bytes(attention: Attention, num_texts: int, num_tokens: int, kv_type: str) -> int:
    """Return the bytes of keys and values of an encoder's texts, which are stored for two layers at a time."""
    sizes = key_block_bytes(kv_type, attention.head_dim) + value_block_bytes(kv_type, attention.head_dim)
    blocks = num_text_pages(num_texts, num_tokens) * TEXT_PAGE_TOKENS // BLOCK_POSITIONS
    return 2 * attention.num_kv_heads * blocks * sizes
