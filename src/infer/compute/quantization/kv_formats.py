"""Names and sizes of the storage formats of keys and values. Loads no torch.

A **cache block** is 16 consecutive positions of one kv head of one layer. Its keys are one contiguous range of bytes,
and its values another. Only `kv_layout` (plain torch, the definition) and, compiled, `cache_blocks` and `cached_forms`
of `backends.cpu` know the layout inside these ranges.
"""

from infer.errors import InvalidRequestError

BLOCK_POSITIONS = 16
VALUES_PER_SCALE = 32  # values of a head per scale, in q8 and q4
QUANTIZED = ("q8", "q4")
# Per block and per dimension of a head. Keys in 4 bits would cost 4 % of perplexity; values in 4 bits cost 0.3 %.
_KEY_BYTES = {"f32": 64, "f16": 32, "bf16": 32, "q8": 17, "q4": 17}
_VALUE_BYTES = {"f32": 64, "f16": 32, "bf16": 32, "q8": 17, "q4": 10}
KV_TYPES = tuple(_KEY_BYTES)


def check_kv_type(kv_type: str, head_dim: int) -> None:
    """Raise InvalidRequestError for an unknown type, or if it cannot store heads of this size."""
    if kv_type not in KV_TYPES:
        raise InvalidRequestError(f"kv_type must be one of {', '.join(KV_TYPES)}, got {kv_type!r:.40}")
    if kv_type in QUANTIZED and head_dim % VALUES_PER_SCALE:
        raise InvalidRequestError(
            f"kv_type {kv_type} needs a head size that {VALUES_PER_SCALE} divides, got {head_dim}: use f16"
        )


def key_block_bytes(kv_type: str, head_dim: int) -> int:
    return _KEY_BYTES[kv_type] * head_dim


def value_block_bytes(kv_type: str, head_dim: int) -> int:
    return _VALUE_BYTES[kv_type] * head_dim


def num_blocks(num_positions: int) -> int:
    return -(-num_positions // BLOCK_POSITIONS)
