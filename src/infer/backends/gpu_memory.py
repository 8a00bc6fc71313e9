"""Memory of matrices and of a step's buffers on a GPU: weight planes, float32 between kernels. No torch, no Triton."""

from collections.abc import Mapping

from infer.backends.before_load import StepSizes
from infer.operands.architecture import Architecture, Layer
from infer.quantization.ggml_types import BLOCK_TYPES

CHUNK_SLOTS, SPLIT_TOKENS = 256, 16  # of attention
# Of a block, where planes take more than the file: small scales are bytes there, and a scale of MXFP4 is two.
_BLOCK_BYTES = {"Q2_K": 100, "Q3_K": 114, "Q4_K": 148, "Q5_K": 180, "IQ4_XS": 138, "MXFP4": 18}


def matrix_bytes(type: str, rows: int, columns: int) -> int:
    block = BLOCK_TYPES[type]
    if type not in _BLOCK_BYTES:
        return rows * block.row_bytes(columns)
    return rows * (columns // block.block_size) * _BLOCK_BYTES[type]


def step_bytes(architecture: Architecture, types: Mapping[str, str], sizes: StepSizes, num_logits: int) -> int:
    """Return the bytes of a step's buffers. All layers share one layer's buffers.

    Recordings of 1, 2, 4 … logits share everything except the logits: twice as many lines as the largest recording has.
    """
    layer = max(_layer_bytes(layer, architecture.hidden_size, sizes) for layer in architecture.layers)
    return layer + 2 * 4 * min(num_logits, sizes.logits) * architecture.vocab_size


def _layer_bytes(layer: Layer, hidden: int, sizes: StepSizes) -> int:
    """Return the bytes of a layer's buffers.

    The buffers hold the residual stream before and after; q, k, v; queries near and far; and the attended values. They
    also hold the MLP's inner values, int8 planes of an input and of a result, and attention's chunks if those are
    programs of their own.
    """
    wide, narrow, inner = layer.num_heads * layer.head_dim, layer.num_kv_heads * layer.head_dim, layer.intermediate_size
    floats = 2 * hidden + 4 * wide + 2 * narrow + 3 * inner
    chunks = -(-sizes.context // CHUNK_SLOTS)
    parts = min(sizes.tokens, SPLIT_TOKENS) * layer.num_heads * chunks * (layer.head_dim + 2)
    return 4 * (sizes.tokens * floats + parts) + 3 * sizes.tokens * (hidden + max(wide, inner))
