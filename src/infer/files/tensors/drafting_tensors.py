"""The tensors of a head that drafts tokens, which a model's files have beside its network: `mtp.*`, or a layer more.

Their names here are those of a model with one layer, which also has `eh_proj`, `enorm` and `hnorm`
(`models.layers.state_input` has the equations). The head shares the network's embedding and its projection to logits.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any

from infer.errors import ModelError
from infer.files.tensors.tensor_info import TensorInfo

_MOST_LAYERS = 64
_LAYER = re.compile(r"(?:((model|language_model)\.)*layers|blk)\.([0-9]+)\.(.+)")
_MTP = re.compile(r"(?:model\.)?mtp\.(layers\.0\.|fc|pre_fc_norm_embedding|pre_fc_norm_hidden|norm)(.+)")
_OF_MTP = {"fc": "eh_proj", "pre_fc_norm_embedding": "enorm", "pre_fc_norm_hidden": "hnorm", "norm": "shared_head.norm"}
_AT, _NORM = "model.layers.0.", "shared_head.norm.weight"

Tensors = Mapping[str, TensorInfo]


def own_tensors(tensors: Tensors, config: Mapping[str, Any]) -> dict[str, TensorInfo]:
    """Return the tensors without those of layers that only draft tokens, which follow the network's own layers."""
    indices = _drafting_layers(config)
    return {name: info for name, info in tensors.items() if not indices or _index_of(name) not in indices}


def drafting_tensors(
    tensors: Tensors, config: Mapping[str, Any], read: Callable[[Tensors], dict[str, TensorInfo]]
) -> dict[str, TensorInfo]:
    """Return the tensors of the first layer that only drafts tokens.

    `read` makes our names and undoes a format's changes. The result is empty if there is no such layer, or if it raises
    ModelError: the model runs without its head.
    """
    layer, indices = dict[str, TensorInfo](), _drafting_layers(config)
    for name, info in tensors.items():
        if (match := _MTP.fullmatch(name)) is not None:
            layer[_AT + _OF_MTP.get(match[1], "") + match[2]] = info
        elif indices and _index_of(name) == indices[0]:
            layer[_AT + name.split(f".{indices[0]}.", 1)[1]] = info
    try:
        named = read(layer)
    except ModelError:
        return {}
    return {"model.norm.weight" if name == _AT + _NORM else name: info for name, info in named.items()}


def _drafting_layers(config: Mapping[str, Any]) -> range:
    first, count = config.get("num_hidden_layers"), config.get("num_nextn_predict_layers")
    if type(first) is not int or type(count) is not int or not 0 < count <= _MOST_LAYERS:
        return range(0)
    return range(first, first + count)


def _index_of(name: str) -> int:
    """Return the index of the layer that has a tensor, in a file's names or in ours, or -1 if none has it."""
    match = _LAYER.fullmatch(name)
    return -1 if match is None else int(match[3])
