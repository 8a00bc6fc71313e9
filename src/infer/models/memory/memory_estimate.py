"""The parts of a model's memory on this machine, by arithmetic on its headers: no torch, and no allocation.

The backend's own rules (`backends.before_load`) count weights. A cache counts with its reserved size.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Protocol, Self, runtime_checkable

from infer.compute.backends.before_load import memory_rules, step_limits
from infer.compute.kvcache.cache_settings import CacheSettings
from infer.compute.kvcache.groups import make_groups, page_bytes, pool_sizes, read_bytes
from infer.compute.operands.architecture import Architecture
from infer.compute.operands.feed_forwards import PER_LAYER_TABLE, Experts
from infer.compute.operands.limits import HOST_STEP, StepLimits
from infer.compute.operands.mixers import KEPT_AS_FLOATS, Attention, Mixer
from infer.compute.quantization.ggml_types import TYPES_OF_FLOATS
from infer.files.tensors.tensor_info import TensorInfo
from infer.model_settings import ModelSettings
from infer.models.tensors import Shaped, expected_shapes

_TYPE_BY_DTYPE = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
_EXPERT = re.compile(r"(?<=\.experts\.)[0-9]+")
_TABLES = ("model.embed_tokens.weight", "lm_head.weight")


@runtime_checkable
class StoredMatrix(Shaped, Protocol):
    """The part of a tensor's header that decides how the matrix is loaded."""

    @property
    def type(self) -> str: ...


@dataclass(frozen=True)
class LoadSettings:
    """The settings of a model that decide its memory, with the numbers that a load finds for them."""

    dtype: str = "auto"
    weights: str = "auto"
    precision: str = "exact"
    num_threads: int = 1
    device: str = "cpu"  # only the kind, without an index
    limits: StepLimits | None = None  # of a step, if they are not the device's
    experts_memory: int | None = None  # bytes; None: all experts are in memory

    @classmethod
    def of(cls, settings: ModelSettings, num_threads: int = 1, device: str = "cpu") -> Self:
        kinds = settings.dtype, settings.weights, settings.precision
        return cls(*kinds, num_threads, device, experts_memory=settings.experts_memory)

    @property
    def step(self) -> StepLimits:
        """Limits of a step of the model."""
        return self.limits or step_limits(self.device)

    @property
    def kv_type(self) -> str:
        """The type that `kv_type="auto"` chooses with these settings."""
        if self.dtype == "auto":
            return "f16"
        return "f32" if self.device != "cuda" else _TYPE_BY_DTYPE[self.dtype].lower()


def kv_type_of(
    architecture: Architecture, tensors: Mapping[str, StoredMatrix], load: LoadSettings, cache: CacheSettings
) -> str:
    """Return the storage type of keys and values. Without a requested type, an encoder's are exact."""
    if cache.kv_type != "auto":
        return cache.kv_type
    if load.device == "cuda" and load.dtype == "auto" and type_of_keys(architecture, tensors) == "BF16":
        return "bf16"
    return "f32" if architecture.reads_whole_texts else load.kv_type


def type_of_keys(architecture: Architecture, tensors: Mapping[str, StoredMatrix]) -> str:
    """Return the type in which the file stores the first layer's matrix of keys, or F32 if no layer has one."""
    layers = enumerate(architecture.layers)
    first = next((index for index, layer in layers if isinstance(layer.mixer, Attention)), None)
    return "F32" if first is None else tensors[f"model.layers.{first}.self_attn.k_proj.weight"].type


def loaded_types(architecture: Architecture, tensors: Mapping[str, StoredMatrix], load: LoadSettings) -> dict[str, str]:
    """Return the type of each matrix after loading, by name. Matrices of experts of several types become F32."""
    shapes = expected_shapes(architecture)
    matrices = (name for name, shape in shapes.items() if name.endswith(".weight") and len(shape) > 1)
    types = {name: _loaded_type(name, tensors[name], load) for name in matrices}
    stacks = {name: _EXPERT.sub("", name) for name in types if ".experts." in name}
    types_by_stack = defaultdict[str, set[str]](set)
    for name, stack in stacks.items():
        types_by_stack[stack].add(types[name])
    return types | {name: "F32" for name, stack in stacks.items() if len(types_by_stack[stack]) > 1}


def _loaded_type(name: str, info: StoredMatrix, load: LoadSettings) -> str:
    if name.endswith(("mlp.router.weight", "mlp.shared_gate.weight")):
        return "F32"
    if name == PER_LAYER_TABLE:
        return info.type
    if load.dtype != "auto":
        return _TYPE_BY_DTYPE[load.dtype]
    if load.weights == "auto" or info.type not in TYPES_OF_FLOATS or name.endswith(KEPT_AS_FLOATS):
        return info.type
    if load.weights == "bf16" or info.shape[1] % 32:
        return "BF16"
    return "Q4_1" if load.weights == "q4" and name not in _TABLES else "Q8_0"


def tensor_sizes(architecture: Architecture, types: Mapping[str, str], device: str = "cpu") -> dict[str, int]:
    """Return the bytes of each tensor by its name: matrices in the kernels' layout, norms and biases in float32.

    A table that stays in its file uses no memory.
    """
    rules, sizes = memory_rules(device), dict[str, int]()
    for name, shape in expected_shapes(architecture).items():
        bytes_of = rules.table_bytes if name == PER_LAYER_TABLE else rules.matrix_bytes
        sizes[name] = bytes_of(types[name], *shape) if name in types else 4 * prod(shape)
    return sizes


def weight_bytes(
    architecture: Architecture, types: Mapping[str, str], device: str = "cpu", experts_memory: int | None = None
) -> int:
    """Return the bytes of the weights. Experts use at most `experts_memory` if it is given."""
    sizes = tensor_sizes(architecture, types, device)
    total = sum(sizes.values())
    for index, layer in enumerate(architecture.layers):
        if isinstance(layer.mixer, Attention) and layer.mixer.has_keys and layer.mixer.are_values_keys:
            total += sizes[f"model.layers.{index}.self_attn.k_proj.weight"]  # a second time, as values
    if experts_memory is not None:
        total -= expert_bytes(architecture, types, device)
        total += memory_rules(device).expert_store_bytes(architecture, types, experts_memory)
    return total


def table_bytes(architecture: Architecture, types: Mapping[str, str], device: str = "cpu") -> int:
    """Return the bytes of the embedding and of the projection to logits."""
    sizes = tensor_sizes(architecture, types, device)
    return sum(sizes[name] for name in _TABLES if name in types)


def expert_bytes(architecture: Architecture, types: Mapping[str, str], device: str = "cpu") -> int:
    """Return the bytes of the matrices of all experts."""
    sizes = tensor_sizes(architecture, types, device)
    return sum(sizes[name] for name in types if ".mlp.experts." in name)


def decode_bytes(architecture: Architecture, types: Mapping[str, str], kv_type: str, context: int) -> int:
    """Return the bytes that one decode step of one row reads after `context` tokens: weights and cache.

    An embedding table that is not the head is left out, because a step reads only one row of it, and so are the experts
    that a token does not use.
    """
    total, sizes, of_experts = weight_bytes(architecture, types), tensor_sizes(architecture, types), Counter[int]()
    for name in types:
        if ".mlp.experts." in name:
            of_experts[int(name.split(".")[2])] += sizes[name]
    parts = ((layer.feed_forward, of_experts[index]) for index, layer in enumerate(architecture.layers))
    routers = [(part.router, size) for part, size in parts if isinstance(part, Experts)]
    total -= int(sum(size * (1 - router.num_chosen / router.num_experts) for router, size in routers))
    if not architecture.tied_embeddings:
        total -= sizes[_TABLES[0]]
    return total + sum(read_bytes(layer, kv_type, context) for layer in architecture.mixers)


def rope_bytes(architecture: Architecture, num_positions: int) -> int:
    """Return the bytes of cosines and sines, one table per kind of rotation, and of the scales of queries."""
    scales = 4 * num_positions * len(architecture.query_scales)
    return scales + sum(
        2 * 4 * num_positions * rope.half * len(rope.sets(num_positions)) for rope in architecture.ropes
    )


def pool_bytes(
    layers: Sequence[Mixer],
    settings: CacheSettings,
    kv_type: str,
    num_tokens: int,
    num_rows: int,
    pool_pages: int | None = None,
    step_tokens: int = HOST_STEP.tokens,
) -> tuple[int, int]:
    """Return the bytes of keys and values, and of states, after every page of the pools has been written."""
    groups, sizes = make_groups(layers, settings, num_tokens, step_tokens), [0, 0]
    for group, count in zip(groups, pool_sizes(groups, num_rows, pool_pages, num_tokens), strict=True):
        each = sum(page_bytes(layers[index], kv_type, settings.page_tokens) for index in group.layers)
        sizes[group.is_recurrent] += count * each
    return sizes[0], sizes[1]


@dataclass(frozen=True)
class StoredWeights:
    type: str
    method: str  # that quantised them into several tensors, read as this type; "": the file has the type
    num_tensors: int
    num_values: int
    num_bytes: int


def weights_by_type(tensors: Mapping[str, TensorInfo]) -> list[StoredWeights]:
    """Return each type of tensors with the method that quantised them into several tensors, the largest first."""
    groups = defaultdict[tuple[str, str], list[tuple[int, int]]](list)
    for info in tensors.values():
        method = "" if info.packed is None else info.packed.description
        groups[info.type, method].append((prod(info.shape), info.file_bytes))
    rows = [StoredWeights(*key, len(sizes), *map(sum, zip(*sizes, strict=True))) for key, sizes in groups.items()]
    return sorted(rows, key=lambda row: -row.num_bytes)


def largest_types(architecture: Architecture, types: Mapping[str, str], device: str = "cpu") -> list[str]:
    """Return the types of the matrices in memory, the type with the most bytes first."""
    by_tensor, sizes = tensor_sizes(architecture, types, device), Counter[str]()
    for name, type_ in types.items():
        sizes[type_] += by_tensor[name]
    return sorted(filter(sizes.get, sizes), key=lambda type_: -sizes[type_])
