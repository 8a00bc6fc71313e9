"""What a model takes in memory here, by arithmetic on its headers: no torch, nothing allocated.

Weights are counted as the CPU's kernels hold them, a cache as it is reserved.
"""

from collections.abc import Iterator, Mapping, Sequence
from math import prod

from infer.architecture import Architecture, Layer
from infer.block_types import BLOCK_TYPES
from infer.checkpoint.mapped import TensorInfo
from infer.kv_types import BLOCK_POSITIONS, key_block_bytes, value_block_bytes
from infer.model.shapes import expected_shapes

ROWS_PER_GROUP, INPUTS_PER_UNIT = 16, 8  # rows that lie side by side; inputs of a float type come in so many
_TYPE_BY_DTYPE = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
_TABLES = ("model.embed_tokens.weight", "lm_head.weight")


def loaded_type(name: str, info: TensorInfo, dtype: str, keep_floats_as: str) -> str:
    """The type of a matrix once it is loaded: `model.load` quantises and converts by the same rules."""
    if dtype != "auto":
        return _TYPE_BY_DTYPE[dtype]
    if keep_floats_as == "auto" or not BLOCK_TYPES[info.type].is_float:
        return info.type
    if keep_floats_as == "bf16" or info.shape[1] % 32:
        return "BF16"
    return "Q4_1" if keep_floats_as == "q4" and name not in _TABLES else "Q8_0"


def packed_bytes(type: str, rows: int, columns: int) -> int:
    kind = BLOCK_TYPES[type]
    columns += -columns % INPUTS_PER_UNIT if kind.is_float else 0
    return (rows + -rows % ROWS_PER_GROUP) * (columns // kind.block_size) * kind.packed_bytes


def weight_bytes(
    architecture: Architecture, tensors: Mapping[str, TensorInfo], dtype: str = "auto", keep_floats_as: str = "auto"
) -> int:
    """Matrices as they are packed, norms and biases in float32."""
    total = 0
    for name, shape in expected_shapes(architecture).items():
        if len(shape) == 1:
            total += 4 * shape[0]
        else:
            total += packed_bytes(loaded_type(name, tensors[name], dtype, keep_floats_as), *shape)
    return total


def rope_bytes(architecture: Architecture, num_positions: int) -> int:
    """Cosines and sines, one table for each kind of rotation."""
    ropes = {layer.rope for layer in architecture.layers if layer.rope is not None}
    return sum(2 * 4 * num_positions * rope.half for rope in ropes)


def slot_bytes(layer: Layer, kv_type: str) -> int:
    """Of one token's keys and values in a layer."""
    block = key_block_bytes(kv_type, layer.head_dim) + value_block_bytes(kv_type, layer.head_dim)
    return layer.num_kv_heads * block // BLOCK_POSITIONS


def cache_bytes_per_token(layers: Sequence[Layer], kv_type: str) -> tuple[int, int]:
    """Of a token in all layers, and in those without a window of their own."""
    whole = [slot_bytes(layer, kv_type) for layer in layers if layer.window is None]
    return sum(slot_bytes(layer, kv_type) for layer in layers), sum(whole)


def weights_by_type(tensors: Mapping[str, TensorInfo]) -> Iterator[tuple[str, int, int, int]]:
    """As the file stores them, the largest first: type, how many tensors, their values, their bytes."""
    found: dict[str, list[int]] = {}
    for info in tensors.values():
        counts = found.setdefault(info.type, [0, 0, 0])
        for index, amount in enumerate((1, prod(info.shape), info.num_bytes)):
            counts[index] += amount
    for type_, (count, values, num_bytes) in sorted(found.items(), key=lambda item: -item[1][2]):
        yield type_, count, values, num_bytes
