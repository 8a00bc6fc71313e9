"""The matrices of a model by kind and layer, for the charts of reports."""

import re
from collections.abc import Iterable, Mapping
from typing import TypeVar

Item = TypeVar("Item")
_LAYER = re.compile(r"model\.layers\.([0-9]+)\.(.+)")
_NUMBER = re.compile(r"\.[0-9]+(?=\.)")


def by_kind_and_layer(items: Mapping[str, Item]) -> dict[str, dict[int, list[Item]]]:
    """Return the items of layers by kind and then by layer, according to the names of tensors.

    All experts of a layer are of one kind.
    """
    found: dict[str, dict[int, list[Item]]] = {}
    for name, item in items.items():
        if (match := _LAYER.fullmatch(name)) is not None:
            kind = _NUMBER.sub("", f".{match[2]}").removeprefix(".").removesuffix(".weight")
            found.setdefault(kind, {}).setdefault(int(match[1]), []).append(item)
    return found


def labels_of(layers: Iterable[int]) -> list[str]:
    return [f"layer {layer}" for layer in layers]
