"""Bytes of matrices and of a step's buffers on a GPU, where kernels pass float32 to each other. No torch, no Triton."""

from collections.abc import Mapping

from infer.compute.backends.before_load import StepSizes
from infer.compute.operands.architecture import Architecture, Layer
from infer.compute.operands.feed_forwards import Dense, Experts
from infer.compute.operands.limits import STATE_TOKENS
from infer.compute.operands.mixers import Attention, GatedDeltaNet, ShortConv
from infer.compute.quantization.ggml_types import BLOCK_TYPES
from infer.errors import InvalidRequestError

CHUNK_SLOTS, SPLIT_TOKENS = 256, 16  # of attention
MOST_PAIRS = 16_384  # of a token and one of its experts, that are computed at a time
FEW_LINES = 64  # of logits, for which a device has memory from the beginning
IS_TAKEN_AT_ONCE = True
_NUM_WORKSPACES = 2  # of recorded steps, which leave gaps between their buffers, and of those that run by themselves
_KERNEL_BYTES = 256 << 20  # of compiled kernels, graphs, page tables and samplers
# Of a block whose planes take more than the file. Small scales are bytes there, a scale of MXFP4 is two bytes, patterns
# are codes of 4 bits, and a scale of more than 32 values is repeated.
_BLOCK_BYTES = {"Q2_K": 100, "Q3_K": 114, "Q4_K": 148, "Q5_K": 180, "IQ4_XS": 138, "MXFP4": 18, "NVFP4": 40}
_BLOCK_BYTES |= {"IQ1_S": 140, "IQ1_M": 148, "IQ2_XXS": 140, "IQ2_XS": 148, "IQ2_S": 148, "IQ3_XXS": 140, "IQ3_S": 138}
_BLOCK_BYTES |= {"TQ1_0": 80, "TQ2_0": 80, "Q1_0": 40, "Q2_0": 20}
_AS_HALVES = frozenset({"NVFP4_SCALED", "F8_E4M3"})


def stored_type(type: str) -> str:
    """Return the type in which GPUs store a matrix of this type."""
    return "F16" if type in _AS_HALVES else type


def matrix_bytes(type: str, rows: int, columns: int) -> int:
    block = BLOCK_TYPES[stored_type(type)]
    if type not in _BLOCK_BYTES:
        return rows * block.row_bytes(columns)
    supers = 2 * -(-columns // 256) if type == "NVFP4" else 0
    return rows * (columns // block.block_size * _BLOCK_BYTES[type] + supers)


table_bytes = matrix_bytes


def expert_store_bytes(architecture: Architecture, types: Mapping[str, str], most_bytes: int) -> int:
    raise InvalidRequestError("experts_memory works on device='cpu', not on a GPU: leave it out")


def workspace_bytes(
    architecture: Architecture, types: Mapping[str, str], sizes: StepSizes, num_logits: int
) -> tuple[int, int]:
    """Return the memory of steps. All layers and all recordings share one layer's buffers.

    Logits take twice their lines: they are computed, then copied to the memory in which the sampler reads them. All
    lines are counted, however few are used at first: a request may need the others.
    """
    layer = max(_layer_bytes(layer, architecture.hidden_size, sizes) for layer in architecture.layers)
    buffers = layer + 4 * sizes.tokens * _shared_floats(architecture)
    lines = 2 * 4 * sizes.logits * architecture.vocab_size
    return _NUM_WORKSPACES * buffers, lines + _KERNEL_BYTES


def _shared_floats(architecture: Architecture) -> int:
    """Return the values per token that live during all layers, or before the first one: the layers' inputs."""
    part = architecture.per_layer_input
    return 0 if part is None else 2 * part.dim * len(architecture.layers)


def _layer_bytes(layer: Layer, hidden: int, sizes: StepSizes) -> int:
    """Return the bytes of a layer's buffers.

    The buffers hold the residual stream before and after, int8 planes of an input and of a result, and what each part
    needs.
    """
    wide, inner, chunks = 0, 0, 0
    floats = 2 * hidden
    if isinstance(layer.mixer, Attention):  # q, k, v, gates; queries near and far; attended values; chunks of a context
        wide = layer.mixer.query_features
        floats += 3 * wide + layer.mixer.widths[1]
        per_chunk = min(sizes.tokens, SPLIT_TOKENS) * layer.mixer.num_heads * (layer.mixer.head_dim + 2)
        chunks = -(-sizes.context // CHUNK_SLOTS) * per_chunk
    if isinstance(layer.mixer, ShortConv):  # the projection and its result
        wide = layer.mixer.num_channels
        floats += sum(layer.mixer.widths)
    if isinstance(layer.mixer, GatedDeltaNet):
        wide = layer.mixer.value_features
        floats += _floats_of_delta_net(layer.mixer)
    if isinstance(layer.feed_forward, Dense):  # gate, up and their product
        inner = layer.feed_forward.intermediate_size
        floats += 3 * inner
    if isinstance(layer.feed_forward, Experts):
        chunks += _floats_of_experts(layer.feed_forward, hidden, sizes.tokens)
    return 4 * (sizes.tokens * floats + chunks) + 3 * sizes.tokens * (hidden + max(wide, inner))


def _floats_of_delta_net(net: GatedDeltaNet) -> int:
    """Return the numbers of a token: the projection and its result, v, Sᵀq, gates, k and q, and their products."""
    inputs, wide = net.widths
    return inputs + 3 * wide + 2 * net.num_value_heads + 2 * net.num_key_heads * (net.key_dim + STATE_TOKENS)


def _floats_of_experts(experts: Experts, hidden: int, num_tokens: int) -> int:
    """Return the memory of experts, in float32 numbers: of some tokens, then of their pairs, and the shared expert."""
    chosen, inner = experts.router.num_chosen, experts.intermediate_size
    tokens = min(num_tokens, max(1, MOST_PAIRS // chosen))
    pair = hidden + 3 * inner + (2 * hidden if experts.router.weighs_inputs else 0)  # planes take up to as much
    token = 5 * hidden + experts.router.num_experts + 3 * experts.shared_size
    return tokens * (token + chosen * pair)
