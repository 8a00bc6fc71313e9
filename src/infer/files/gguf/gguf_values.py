"""Checked values of a GGUF file's metadata. A ModelFormatError names the key, the rule and the value.

The functions at the end make settings from several keys, for the architectures that need them: each gets the metadata
and the settings made so far, and returns further settings under the names of Hugging Face's config. The table of
`forms` says which architecture needs which function.
"""

import math
import re
from collections.abc import Mapping
from typing import Any, NoReturn

import numpy as np

from infer.errors import ModelFormatError, UnsupportedModelError
from infer.files.gguf.gguf import GGUFFile

_LARGEST = float(np.finfo(np.float32).max)
_PERIOD = 4  # layers, a constant of llama.cpp: the first layer of each period has no window
_HEADS, _KV_HEADS, _SIZES = "attention.head_count", "attention.head_count_kv", "feed_forward_length"
_LOCAL_BASE, _NUM_DENSE = "rope.freq_base_swa", "leading_dense_block_count"
_WITHOUT_NORMS = 128  # number of experts, by which llama.cpp distinguishes models


class GGUFValues:
    """The metadata under the architecture's name."""

    def __init__(self, file: GGUFFile) -> None:
        if not file.tensors:
            raise ModelFormatError(file.path, "tensor count", "expected weights, got only a vocabulary")
        self.file = file
        architecture = file.metadata.get("general.architecture")
        if not isinstance(architecture, str) or not re.fullmatch(r"[a-zA-Z0-9_.-]{1,64}", architecture):
            raise ModelFormatError(file.path, "general.architecture", f"expected a name, got {architecture!r:.80}")
        self.architecture = architecture

    def has(self, key: str) -> bool:
        return f"{self.architecture}.{key}" in self.file.metadata

    def get(self, key: str, default: Any = None) -> Any:
        return self.file.metadata.get(f"{self.architecture}.{key}", default)

    def count(
        self,
        key: str,
        default: int | None = None,
        most: int = (1 << 31) - 1,
        *,
        least: int = 1,
        skips_zeros: bool = False,
        may_differ: bool = False,
    ) -> int:
        """Return an integer from `least` to `most`. A list with the same value for every layer counts as that value.

        skips_zeros: Zeros in a list are ignored, because they belong to layers of another kind.
        may_differ: A list counts as its first value, because other settings are made from the whole list.
        """
        value = self.get(key, default)
        if skips_zeros and isinstance(value, list):
            value = [entry for entry in value if entry != 0] or default
        if isinstance(value, list) and value:
            if not may_differ and any(entry != value[0] for entry in value):
                name = f"{self.file.path.name}: {self.architecture}.{key}"
                raise UnsupportedModelError(f"{name} differs between layers, which is not supported")
            value = value[0]
        if value is None:
            self.fail(key, "is missing")
        if type(value) is not int or not least <= value <= most:
            self.fail(key, f"expected an integer from {least} to {most}, got {value!r:.60}")
        return value

    def real(self, key: str, default: float | None = None) -> float:
        value = self.get(key, default)
        if value is None:
            self.fail(key, "is missing")
        if not isinstance(value, float):
            self.fail(key, f"expected a float, got {value!r:.60}")
        return float(shortest(value))

    def of_layers(self, key: str, num_layers: int) -> list[Any] | None:
        """Return the list with a value per layer, or None for another value. Raises ModelFormatError for its length."""
        given = self.get(key)
        if not isinstance(given, list):
            return None
        if len(given) != num_layers:
            self.fail(key, f"expected a number for each of {num_layers} layers, got {len(given)}")
        return given

    def fail(self, key: str, problem: str) -> NoReturn:
        raise ModelFormatError(self.file.path, f"{self.architecture}.{key}", problem)


def rotated_share(num_rotated: int, head_dim: int) -> float:
    """Return the rotating share of a head, whose product with `head_dim` is at least `num_rotated`."""
    share = num_rotated / head_dim
    return share if int(head_dim * share) == num_rotated else math.nextafter(share, 2.0)


def shortest(value: Any) -> Any:
    """Return a float32 as its shortest decimal: 1e-05 instead of its double, 9.999999747378752e-06."""
    if isinstance(value, float) and abs(value) <= _LARGEST and float(np.float32(value)) == value:
        return float(str(np.float32(value)))
    return value


def layers_of_two_kinds(values: GGUFValues, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of layers with and without windows, which have heads of different sizes and numbers."""
    kinds = config.get("layer_types") or []
    full = kinds.index("full_attention") if "full_attention" in kinds else 0
    sliding = kinds.index("sliding_attention") if "sliding_attention" in kinds else 0
    kv_heads, sizes = (values.of_layers(key, config["num_hidden_layers"]) for key in (_KV_HEADS, _SIZES))
    found: dict[str, Any] = {
        "global_head_dim": config["head_dim"],
        "head_dim": values.count("attention.key_length_swa", default=config["head_dim"]),
        "attention_k_eq_v": not {f"blk.{full}.attn_v.weight", f"blk.{full}.attn_qkv.weight"} & set(values.file.tensors),
        "enable_moe_block": bool(values.get("expert_count", 0)),
        "use_double_wide_mlp": sizes is not None and sizes[-1] == 2 * sizes[0],
    }
    if kv_heads is not None:
        found |= {"num_key_value_heads": kv_heads[sliding], "num_global_key_value_heads": kv_heads[full]}
    return found


def chunked_layers(values: GGUFValues, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of layers with chunks. Chunks and the scale of queries are constants of llama.cpp."""
    found: dict[str, Any] = {
        "intermediate_size_mlp": config["intermediate_size"],
        "intermediate_size": values.count("expert_feed_forward_length"),
        "use_qk_norm": config.get("num_experts") != _WITHOUT_NORMS,
    }
    if values.get("attention.sliding_window") == 0:  # then every layer rotates
        every = [1] * config["num_hidden_layers"]
        return found | {"attention_chunk_size": None, "no_rope_layers": every, "layer_types": None}
    kinds = config.get("layer_types") or []
    chunked = ["chunked_attention" if kind == "sliding_attention" else kind for kind in kinds]
    return found | {"layer_types": chunked or None}


def layers_of_other_heads(values: GGUFValues, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of layers with other numbers of heads, ropes of their own, gates, and experts or none."""
    num_layers, kinds = config["num_hidden_layers"], _kinds_in_periods(values, config)
    gate = values.file.tensors.get("blk.0.attn_gate.weight")  # with a row for each gate
    is_per_head = gate is not None and gate.shape[:1] == (config["num_attention_heads"],)
    found: dict[str, Any] = {"layer_types": kinds, "gating": "per-head" if is_per_head else "per-element"}
    num_dense = values.count(_NUM_DENSE, 0, num_layers, least=0)
    found["mlp_layer_types"] = ["dense"] * num_dense + ["sparse"] * (num_layers - num_dense)
    if isinstance(heads := values.get(_HEADS), list):
        found["num_attention_heads_per_layer"] = heads
    partial = config.get("partial_rotary_factor", 1.0)
    ropes = {"full_attention": {"rope_theta": config["rope_theta"], "partial_rotary_factor": partial}}
    if "sliding_attention" in kinds:
        theta = values.real(_LOCAL_BASE, default=config["rope_theta"])
        share = rotated_share(values.count("rope.dimension_count_swa"), config["head_dim"])
        ropes["sliding_attention"] = {"rope_theta": theta, "partial_rotary_factor": share}
    return found | {"rope_parameters": ropes}


def _kinds_in_periods(values: GGUFValues, config: Mapping[str, Any]) -> list[str]:
    """Return the kind of each layer. A pattern that is a number is a period, which begins with full attention."""
    num_layers, period = config["num_hidden_layers"], values.get("attention.sliding_window_pattern", _PERIOD)
    if config["sliding_window"] is None:
        return ["full_attention"] * num_layers
    if isinstance(period, list):
        return list(config["layer_types"])
    return ["sliding_attention" if index % period else "full_attention" for index in range(num_layers)]


def layers_that_rotate_in_windows(values: GGUFValues, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of ropes in layers with windows. The other layers do not rotate."""
    theta = values.real(_LOCAL_BASE, default=config["rope_theta"])
    rotated = [theta if kind == "sliding_attention" else 0.0 for kind in config["layer_types"]]
    cap = config.get("final_logit_softcapping")
    return {"final_logit_softcapping": cap, "rope_theta": theta, "layer_rope_theta": rotated}


def short_convolutions(values: GGUFValues, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the kinds of layers. Those with convolutions have no heads of keys."""
    heads = values.of_layers(_KV_HEADS, config["num_hidden_layers"])
    return {} if heads is None else {"layer_types": ["full_attention" if count else "conv" for count in heads]}


def delta_nets(values: GGUFValues, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of gated delta nets. llama.cpp stores decays, not their logarithms."""
    num_layers, num_heads = config["num_hidden_layers"], config["linear_num_value_heads"]
    inner_size = values.count("ssm.inner_size")
    if inner_size % num_heads:
        values.fail("ssm.inner_size", f"expected a multiple of {num_heads} value heads, got {inner_size}")
    found = {"linear_value_head_dim": inner_size // num_heads, "linear_decay_is_log": False}
    flags = values.get("attention.recurrent_layers")  # includes layers that draft tokens
    if flags is None:
        return found
    if not isinstance(flags, list) or len(flags) < num_layers or not all(type(flag) is bool for flag in flags):
        values.fail("attention.recurrent_layers", f"expected a flag for each of {num_layers} layers, got {flags!r:.60}")
    kinds = ["linear_attention" if flag else "full_attention" for flag in flags[:num_layers]]
    return {**found, "layer_types": kinds}


def parts_in_parallel(values: GGUFValues, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the setting of layers without a norm before the feed-forward, which is then in parallel to attention."""
    return {"use_parallel_residual": "blk.0.ffn_norm.weight" not in values.file.tensors}


def learned_positions(values: GGUFValues, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of tables of positions and types. The context may be shorter than the table of positions."""
    tensors, length = values.file.tensors, config["max_position_embeddings"]
    table = tensors.get("position_embd.weight")
    most = length if table is None else table.shape[0]
    limit = {"text_limit": length} if length < most else {}
    return {"max_position_embeddings": most, **types_of_texts(values, config), **limit}


def types_of_texts(values: GGUFValues, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the setting of a table of types."""
    types = values.file.tensors.get("token_types.weight")
    if types is None:
        return {"type_vocab_size": 0}
    return {"type_vocab_size": types.shape[0] if len(types.shape) > 1 else 1}
