"""Explain a model from its headers: its network layer by layer, its tokenizer, its defaults, its memory. No torch."""

import re
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Self

from infer.compute.backends.before_load import memory_rules
from infer.compute.kvcache.cache_settings import CacheSettings
from infer.compute.kvcache.groups import page_bytes, slot_bytes
from infer.compute.operands.architecture import Layer
from infer.compute.operands.feed_forwards import Router
from infer.compute.operands.limits import STATE_TOKENS
from infer.compute.operands.mixers import Attention, QueryScale, Rope
from infer.compute.quantization.kv_formats import KV_TYPES, QUANTIZED, VALUES_PER_SCALE
from infer.files import Checkpoint
from infer.files.generation_config import defaults_of
from infer.models.catalog.header_facts import tasks_of
from infer.models.families import open_network
from infer.models.memory.memory_budget import MemoryBudget
from infer.models.memory.memory_estimate import LoadSettings, StoredWeights, expert_bytes, weights_by_type
from infer.text.tokenizer import Tokenizer
from infer.text.tokenizer.gguf_encoders import is_encoder
from infer.text.tokenizer.gguf_vocabulary import TokenType
from infer.text.tokenizer.pre_tokenizers import WITH_SCORES
from infer.text.tokenizer.tokenizers_library import steps_of
from infer.text.tokenizer.value_checks import check_metadata

_USES = {"embed": "embeds texts", "rerank": "ranks documents", "classify": "labels texts"}
_WORD_STARTS = re.compile(r"(?<=[a-z])(?=[A-Z])")


@dataclass(frozen=True)
class LayerGroup:
    """Layers that are the same. `values` are the values that not all layers share."""

    layers: tuple[int, ...]
    values: Mapping[str, Any]


@dataclass(frozen=True)
class TokenizerSummary:
    kind: str
    pre_tokenizer: str
    vocab_size: int
    num_special_tokens: int
    adds_bos: bool
    bos: str | None
    ends: Mapping[int, str]  # the ids that end an answer
    templates: tuple[str, ...]  # names of the chat templates


@dataclass(frozen=True)
class CacheSize:
    kv_type: str
    bytes_per_1000_tokens: int
    bytes_per_1000_tokens_beyond_windows: int  # after layers with a window have filled it

    @classmethod
    def of(cls, layers: Sequence[Attention], kv_type: str) -> Self:
        sizes = [(1000 * slot_bytes(layer, kv_type), layer.most_seen is None) for layer in layers]
        return cls(kv_type, sum(size for size, _ in sizes), sum(size for size, is_whole in sizes if is_whole))


@dataclass(frozen=True)
class Explanation:
    name: str
    path: str
    file_format: str
    file_bytes: int
    num_parameters: int
    architecture: Mapping[str, Any]
    common: Mapping[str, Any]  # values that all layers share
    layer_groups: tuple[LayerGroup, ...]
    tokenizer: TokenizerSummary
    sampling_defaults: Mapping[str, Any]
    weights: tuple[StoredWeights, ...]
    weight_bytes: int  # in memory
    expert_bytes: int  # of these, those of experts, which may also be read from a file
    f16_on_opencl: tuple[str, ...]  # types of the weights that OpenCL stores as F16
    cache: tuple[CacheSize, ...]
    q8_pays_from: int | None  # context, on a CPU with default settings: `kvcache.groups`
    state_bytes: int  # of layers with a state: per page of 64 tokens that a sequence holds
    is_encoder: bool  # an encoder generates no text
    uses: tuple[str, ...]  # the uses for whole texts for which its files have heads

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def explain(model: str | Path) -> Explanation:
    """Return the explanation of a model.

    Raises the errors of loading it: for an unsupported family, tensor or tokenizer.
    """
    checkpoint, architecture = open_network(model)
    kept = tuple(mixer for mixer in architecture.attention if mixer.has_keys)
    weights = tuple(weights_by_type(checkpoint.tensors))
    common, groups = group_layers(architecture.layers)
    stored_on_opencl = memory_rules("opencl").stored_type
    budget = MemoryBudget.of(architecture, checkpoint.tensors, LoadSettings(), CacheSettings(), num_tokens=1)
    return Explanation(
        name=str(model),
        path=str(checkpoint.path),
        file_format="safetensors" if checkpoint.path.is_dir() else "GGUF",
        file_bytes=sum(file.size for file in checkpoint.files),
        num_parameters=sum(each.num_values for each in weights),
        architecture={name: value for name, value in _fields_of(architecture).items() if name != "layers"},
        common=common,
        layer_groups=groups,
        tokenizer=_summarize(checkpoint),
        sampling_defaults=dict(defaults_of(checkpoint)),
        weights=weights,
        weight_bytes=budget.matrix_bytes,
        expert_bytes=expert_bytes(architecture, budget.types or {}),
        f16_on_opencl=tuple(each.type for each in weights if stored_on_opencl(each.type) != each.type),
        cache=tuple(CacheSize.of(kept, kv_type) for kv_type in _kv_types(kept)),
        q8_pays_from=replace(budget, num_tokens=architecture.own_length).q8_pays_from,
        state_bytes=sum(
            page_bytes(mixer, "f32", STATE_TOKENS) for mixer in architecture.mixers if not isinstance(mixer, Attention)
        ),
        is_encoder=architecture.reads_whole_texts,
        uses=tuple(_USES[task] for task in tasks_of(checkpoint, is_encoder=architecture.reads_whole_texts)),
    )


def group_layers(layers: Sequence[Layer]) -> tuple[dict[str, Any], tuple[LayerGroup, ...]]:
    """Return the values that all layers share, and the groups of equal layers, ordered by their first layers."""
    values = [_values(layer) for layer in layers]
    common = {
        name: value for name, value in values[0].items() if all(name in each and each[name] == value for each in values)
    }
    groups: dict[Layer, list[int]] = {}
    for index, layer in enumerate(layers):
        groups.setdefault(layer, []).append(index)
    return common, tuple(
        LayerGroup(tuple(indices), {name: x for name, x in values[indices[0]].items() if name not in common})
        for indices in groups.values()
    )


def _values(layer: Layer) -> dict[str, Any]:
    """Return the kinds of a layer's parts, with the values of the parts and of the norms around them."""
    found = dict[str, Any]()
    for name, part in (("mixer", layer.mixer), ("feed_forward", layer.feed_forward)):
        found[name] = None if part is None else _WORD_STARTS.sub("_", type(part).__name__).lower()
        if part is not None:
            found |= {name: _plain(value) for name, value in _fields_of(part).items()}
    found["per_layer_input"] = None if layer.per_layer_input is None else layer.per_layer_input.dim
    found["has_layer_scale"] = layer.has_scale
    return found | {f"norms_{name}": value for name, value in _fields_of(layer.norms).items()}


def _fields_of(value: Any) -> dict[str, Any]:
    return {field.name: getattr(value, field.name) for field in fields(value)}


def _plain(value: Any) -> Any:
    if isinstance(value, Router | QueryScale):
        return _fields_of(value)
    return _rope(value) if isinstance(value, Rope) else value


_STILL = 1e20  # pairs with larger factors do not rotate; files have 1e30


def _rope(rope: Rope) -> dict[str, Any]:
    """Return the rope's values. A table of factors becomes its smallest and largest factor of rotating pairs."""
    found: dict[str, Any] = {"theta": rope.theta, "dim": rope.dim}
    if rope.frequency_factors is not None:
        turned = [factor for factor in rope.frequency_factors if factor < _STILL]
        found["frequency_factors"] = [min(turned, default=1.0), max(turned, default=1.0)]
        if num_still := rope.half - len(turned):
            found["pairs_that_do_not_turn"] = num_still
    if rope.attention_factor != 1.0:
        found["attention_factor"] = rope.attention_factor
    if rope.long is not None:
        found["other_beyond"] = rope.long.beyond
    return found


def _kv_types(layers: Sequence[Attention]) -> Iterator[str]:
    """Yield the types in which the keys and values of the network's heads can be cached."""
    for kv_type in KV_TYPES:
        if kv_type not in QUANTIZED or all(layer.head_dim % VALUES_PER_SCALE == 0 for layer in layers):
            yield kv_type


def _summarize(checkpoint: Checkpoint) -> TokenizerSummary:
    metadata = checkpoint.metadata
    if metadata:
        check_metadata(metadata)
        reduced, ids = _without_words(metadata)
        tokenizer = Tokenizer.from_gguf(reduced)
        kind, vocab_size = str(metadata.get("tokenizer.ggml.model")), len(metadata["tokenizer.ggml.tokens"])
        cut = "▁" if kind in (WITH_SCORES, "t5") else str(metadata.get("tokenizer.ggml.pre", "default"))
    else:
        tokenizer = Tokenizer.from_folder(checkpoint.path)
        vocab_size = tokenizer.backend.get_vocab_size(with_added_tokens=True)
        kind, ids = type(tokenizer.backend.model).__name__, range(vocab_size)
        cut = ", ".join(step["type"] for step in steps_of(tokenizer.backend.pre_tokenizer)) or "none"
    backend = tokenizer.backend
    return TokenizerSummary(
        kind=kind,
        pre_tokenizer=cut,
        vocab_size=vocab_size,
        num_special_tokens=len(tokenizer.special_token_ids),
        adds_bos=tokenizer.adds_bos,
        bos=None if tokenizer.bos_token_id is None else backend.id_to_token(tokenizer.bos_token_id),
        ends={ids[index]: str(backend.id_to_token(index)) for index in sorted(tokenizer.eos_token_ids)},
        templates=tokenizer.chat_template_names,
    )


def _without_words(metadata: Mapping[str, Any]) -> tuple[Mapping[str, Any], Sequence[int]]:
    """Return the metadata of a tokenizer without plain words, and the ids of its tokens.

    Creating the words and merges of a large vocabulary takes seconds, but they do not affect how a text begins and
    ends. The words of an encoder stay, because they are created quickly.
    """
    if is_encoder(metadata):
        return metadata, range(len(metadata.get("tokenizer.ggml.tokens") or ()))
    is_marked = metadata.get("tokenizer.ggml.model") == WITH_SCORES
    model = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "default"} if is_marked else {}
    adds_bos = metadata.get("tokenizer.ggml.add_bos_token", is_marked)
    reduced = {**metadata, **model, "tokenizer.ggml.merges": [], "tokenizer.ggml.add_bos_token": adds_bos}
    texts, types = (metadata.get(f"tokenizer.ggml.{name}") for name in ("tokens", "token_type"))
    if not isinstance(texts, list) or not isinstance(types, list) or len(texts) != len(types):
        return reduced, range(len(texts) if isinstance(texts, list) else 0)
    named = {key: x for key, x in metadata.items() if key.endswith("_token_id") and x in range(len(texts))}
    kept = {index for index, kind in enumerate(types) if kind != TokenType.NORMAL or texts[index][:1] in ("<", "[")}
    ids = sorted(kept | set(named.values()))
    reduced |= {key: bisect_left(ids, token_id) for key, token_id in named.items()}
    for name, values in (("tokens", texts), ("token_type", types)):
        reduced[f"tokenizer.ggml.{name}"] = [values[index] for index in ids]
    return reduced, ids
