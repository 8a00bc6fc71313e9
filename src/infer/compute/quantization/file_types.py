"""The file types of GGUF: the type of most tensors, and llama.cpp's exceptions for some tensors (`llama-quant.cpp`).

Loads no torch. A choice depends on a tensor's part in the network, its layer, and a few numbers of the model.
"""

from collections import Counter
from typing import Literal, NamedTuple, final

from infer.compute.quantization.ggml_types import BLOCK_TYPES

Part = Literal["output", "embedding", "v", "k", "q", "attention_output", "up", "gate", "down", "other"]


class FileType(NamedTuple):
    """A kind of file: `general.file_type` in its metadata, and the type of most tensors."""

    number: int
    type: str


FILE_TYPES = {
    "F32": FileType(0, "F32"),
    "F16": FileType(1, "F16"),
    "BF16": FileType(32, "BF16"),
    "Q8_0": FileType(7, "Q8_0"),
    "Q6_K": FileType(18, "Q6_K"),
    "Q5_K_M": FileType(17, "Q5_K"),
    "Q5_K_S": FileType(16, "Q5_K"),
    "Q5_1": FileType(9, "Q5_1"),
    "Q5_0": FileType(8, "Q5_0"),
    "Q4_K_M": FileType(15, "Q4_K"),
    "Q4_K_S": FileType(14, "Q4_K"),
    "Q4_1": FileType(3, "Q4_1"),
    "Q4_0": FileType(2, "Q4_0"),
    "IQ4_NL": FileType(25, "IQ4_NL"),
    "IQ4_XS": FileType(30, "IQ4_XS"),
    "MXFP4_MOE": FileType(38, "MXFP4"),
    "Q3_K_L": FileType(13, "Q3_K"),
    "Q3_K_M": FileType(12, "Q3_K"),
    "Q3_K_S": FileType(11, "Q3_K"),
    "IQ3_M": FileType(27, "IQ3_S"),
    "IQ3_S": FileType(26, "IQ3_S"),
    "IQ3_XS": FileType(22, "IQ3_S"),
    "IQ3_XXS": FileType(23, "IQ3_XXS"),
    "Q2_K": FileType(10, "Q2_K"),
    "Q2_K_S": FileType(21, "Q2_K"),
    "IQ2_M": FileType(29, "IQ2_S"),
    "IQ2_S": FileType(28, "IQ2_XS"),
    "IQ2_XS": FileType(20, "IQ2_XS"),
    "IQ2_XXS": FileType(19, "IQ2_XXS"),
    "Q2_0": FileType(41, "Q2_0"),
    "TQ2_0": FileType(37, "TQ2_0"),
    "TQ1_0": FileType(36, "TQ1_0"),
    "IQ1_M": FileType(31, "IQ1_M"),
    "IQ1_S": FileType(24, "IQ1_S"),
    "Q1_0": FileType(40, "Q1_0"),
}
# Tensor types that need an importance matrix.
NEED_A_MATRIX = frozenset({"IQ3_XXS", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ1_M", "IQ1_S"})

_FALLBACKS = {  # a type with smaller blocks, for rows that are not a multiple of the block
    **dict.fromkeys(("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ4_XS"), "IQ4_NL"),
    **dict.fromkeys(("Q1_0", "Q2_0", "Q2_K", "Q3_K", "TQ1_0", "TQ2_0", "NVFP4"), "Q4_0"),
    "Q4_K": "Q5_0",
    "Q5_K": "Q5_1",
    "Q6_K": "Q8_0",
}  # fmt: skip
_FEW_BITS = frozenset({"IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ2_M", "IQ1_S", "IQ1_M"})  # file types with their own rules
_FOR_TWO_BITS = frozenset({"IQ2_S", "IQ2_M"})
_PARTS: tuple[tuple[str, Part], ...] = (
    ("attn_qkv.weight", "v"),
    ("attn_kv_b.weight", "v"),
    ("attn_v.weight", "v"),
    ("attn_k.weight", "k"),
    ("attn_q.weight", "q"),
    ("attn_output.weight", "attention_output"),
    ("ffn_up", "up"),
    ("ffn_gate", "gate"),
    ("ffn_down", "down"),
)
_KEPT = (
    *("_norm.weight", "ffn_gate_inp.weight", "altup", "laurel", "per_layer_model_proj", "ssm_conv1d"),
    *("shortconv.conv.weight", "position_embd", "token_types.weight", "attn_rel_b.weight"),
)


def part_of(name: str) -> Part:
    """Return the part of the network of a tensor with this name."""
    if name == "output.weight":
        return "output"
    if name in ("token_embd.weight", "per_layer_token_embd.weight"):
        return "embedding"
    return next((part for text, part in _PARTS if text in name), "other")


def may_quantise(name: str, shape: tuple[int, ...]) -> bool:
    """Return True unless a tensor keeps its type: norms, biases, routers, convolutions and other small tensors.

    `shape` has the rows first. A matrix with one row counts as a vector.
    """
    num_axes = len(shape) - next((axis for axis, count in enumerate(shape) if count > 1), len(shape) - 1)
    return num_axes > 1 and name.endswith("weight") and not any(text in name for text in _KEPT)


def with_whole_blocks(type: str, columns: int) -> str:
    """Return the type, or the nearest type whose blocks divide a row of this length."""
    if columns % BLOCK_TYPES[type].block_size == 0:
        return type
    smaller = _FALLBACKS.get(type, type)
    return smaller if columns % BLOCK_TYPES[smaller].block_size == 0 else "F16"


class Traits(NamedTuple):
    """The numbers of a model on which its mixture depends."""

    num_layers: int
    num_experts: int = 0
    heads_per_key_head: int = 1
    is_of_70b: bool = False
    is_falcon: bool = False
    has_output: bool = False  # otherwise the embedding is also the output matrix
    has_matrix: bool = False  # True if an importance matrix is given


@final
class Mixture:
    """Chooses types of a file's tensors. The tensors must be passed in the order of `sorting_key`."""

    def __init__(self, name: str, traits: Traits, num_values: int) -> None:
        """Begin a file. `num_values` is the number of its tensors whose part is "v"."""
        self._name, self._default, self.traits = name, FILE_TYPES[name].type, traits
        self._num_values, self._seen = num_values, Counter[Part]()

    def choose(self, name: str, shape: tuple[int, ...]) -> str:
        """Return the type of a tensor that may be quantised, without regard to the length of its rows."""
        part, traits = part_of(name), self.traits
        if part == "output" or (part == "embedding" and not traits.has_output):
            return self._of_output(shape)
        if self._name == "MXFP4_MOE":
            return "MXFP4" if len(shape) == 3 and shape[0] > 1 else "Q8_0"
        if part == "embedding":
            return self._of_embedding()
        index = self._seen[part]
        self._seen[part] += 1
        layer = _layer(name) if traits.num_experts > 1 and part in ("up", "gate", "down") else index
        if self._name in _FEW_BITS:
            return self._of_few_bits(part, index)
        return self._by_part(part, layer) or self._default

    def _by_part(self, part: Part, layer: int) -> str | None:
        match part:
            case "v":
                return self._of_values(layer)
            case "k" if self.traits.num_experts == 8:
                return "Q8_0"
            case "k" | "q":
                return {"IQ3_XS": "IQ3_XXS", "IQ3_XXS": "IQ2_S"}.get(self._name)
            case "down":
                return self._of_down(layer)
            case "attention_output":
                return self._of_attention_output()
            case "gate" | "up":
                return self._of_gate_and_up(layer)
        return None

    def _of_output(self, shape: tuple[int, ...]) -> str:
        if self.traits.is_falcon or self._name == "MXFP4_MOE" or self._default == "Q8_0":
            return "Q8_0"
        if shape[-1] % BLOCK_TYPES[self._default].block_size:
            return "Q8_0"
        return "Q5_K" if self._name in _FEW_BITS | {"IQ3_XXS"} else "Q6_K"

    def _of_embedding(self) -> str:
        if self._name in _FOR_TWO_BITS | {"IQ3_XXS"}:
            return "IQ3_S"
        if self._name in _FEW_BITS:
            return "Q2_K"
        return "Q4_K" if self._name in ("TQ1_0", "TQ2_0", "Q2_0") else self._default

    def _of_few_bits(self, part: Part, index: int) -> str:
        traits, better = self.traits, "IQ3_S" if self._name in _FOR_TWO_BITS else "Q2_K"
        if part == "v":
            return "Q4_K" if traits.heads_per_key_head >= 4 or traits.num_experts >= 4 else better
        if part == "k" and traits.num_experts == 8:
            return "Q4_K"
        if part == "down" and index < traits.num_layers // 8:
            return better
        if part == "attention_output":
            if traits.num_experts == 8:
                return "Q5_K"
            if self._name in ("IQ1_S", "IQ1_M"):
                return "IQ2_XXS"
            return "IQ3_S" if self._name in _FOR_TWO_BITS else self._default
        return self._default

    def _of_values(self, index: int) -> str:
        name, traits, is_shared = self._name, self.traits, self.traits.heads_per_key_head >= 4
        has_more = _has_more_bits(index, self._num_values)
        chosen = {
            "Q2_K": "Q4_K" if is_shared else "Q3_K",
            "Q2_K_S": "Q4_K" if is_shared else None,
            "IQ3_XXS": "Q4_K" if is_shared else None if traits.has_matrix else "IQ3_S",
            "IQ3_XS": "Q4_K" if is_shared else None,
            "IQ3_S": "Q4_K" if is_shared else None,
            "IQ3_M": "Q4_K",
            "Q3_K_M": "Q5_K" if index < 2 else "Q4_K",
            "Q3_K_L": "Q5_K",
            "IQ4_NL": "Q5_K" if is_shared else None,
            "IQ4_XS": "Q5_K" if is_shared else None,
            "Q4_K_M": "Q6_K" if has_more else None,
            "Q5_K_M": "Q6_K" if has_more else None,
            "Q4_K_S": "Q5_K" if index < 4 else None,
        }.get(name) or self._default
        if traits.num_experts == 8:
            return "Q8_0"
        return "Q5_K" if traits.is_of_70b and chosen in ("Q3_K", "Q4_K") else chosen

    def _of_down(self, layer: int) -> str | None:
        traits, count = self.traits, self.traits.num_layers
        is_early, has_more = layer < count // 8, _has_more_bits(layer, count)
        chosen: dict[str, str | None] = {
            "Q2_K": "Q3_K",
            "Q2_K_S": "Q4_K" if is_early else None,
            "Q3_K_M": "Q5_K" if layer < count // 16 else "Q4_K",
            "IQ3_M": "Q4_K" if is_early or (traits.num_experts == 8 and has_more) else None,
            "Q3_K_L": "Q5_K",
            "Q4_K_M": "Q6_K" if has_more else None,
            "Q5_K_M": "Q6_K" if has_more else None,
            "Q4_K_S": "Q5_K" if is_early else None,
        }
        if traits.has_matrix:
            chosen |= {"Q4_0": "Q4_1" if is_early else None, "Q5_0": "Q5_1" if is_early else None}
        else:
            chosen |= {"IQ3_XXS": "Q4_K" if is_early else "Q3_K"}
            chosen |= dict.fromkeys(("IQ4_NL", "IQ4_XS"), "Q5_K" if is_early else None)
        if traits.is_falcon:
            is_first = layer < count // 16
            chosen |= {
                "Q3_K_M": "Q5_K" if is_first else "Q4_K" if has_more else "Q3_K",
                "Q3_K_L": "Q4_K",
                "Q4_K_M": "Q6_K" if is_first else "Q5_K" if has_more else "Q4_K",
                "Q4_K_S": None,
            }
        return chosen.get(self._name)

    def _of_attention_output(self) -> str | None:
        if self.traits.is_falcon:
            return "Q4_K" if self._name == "Q3_K_L" else None
        if self.traits.num_experts == 8:
            lifted = {"Q2_K", "IQ3_XS", "IQ3_XXS", "Q3_K_S", "Q3_K_M", "IQ4_NL", "Q4_K_S", "Q4_K_M", "IQ3_S", "IQ3_M"}
            return "Q5_K" if self._name in lifted | {"IQ4_XS"} else None
        chosen = {"Q2_K": "Q3_K", "IQ3_XXS": "IQ3_S", "Q3_K_M": "Q4_K", "Q3_K_L": "Q5_K", "IQ3_M": "Q4_K"}
        return chosen.get(self._name)

    def _of_gate_and_up(self, layer: int) -> str | None:
        count = self.traits.num_layers
        return "IQ3_XXS" if self._name == "IQ3_XS" and count // 8 <= layer < 7 * count // 8 else None


def sorting_key(name: str) -> tuple[int, str]:
    """Return the sorting key of a tensor among those of a file: by layer, then by name."""
    return (_layer(name) if name.startswith("blk.") else -1), name


def _layer(name: str) -> int:
    """Return the layer of a name such as blk.3.ffn_down.weight, or −1."""
    number = name.removeprefix("blk.").partition(".")[0]
    return int(number) if number.isascii() and number.isdigit() else -1


def _has_more_bits(layer: int, count: int) -> bool:
    return layer < count // 8 or layer >= 7 * count // 8 or (layer - count // 8) % 3 == 2
