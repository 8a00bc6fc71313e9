"""Decoders whose config has attention to the whole text: embedding models such as EmbeddingGemma.

`transformers` reads `is_causal: false` for every decoder: a window then ends `sliding_window` tokens away, on both
sides. For Gemma 3 it also reads `use_bidirectional_attention`: a window then ends `sliding_window // 2` tokens away.
"""

import re
from dataclasses import replace

from infer.compute.operands.architecture import Architecture, Layer, unusual_parts
from infer.compute.operands.mixers import Attention
from infer.errors import UnsupportedModelError
from infer.models.families.config_values import Config, flag
from infer.models.families.family import Family

_BIDIRECTIONAL = "use_bidirectional_attention"
_OF_IMAGES = "vision"  # a value of the setting: only tokens of images attend to later tokens
_WITHOUT_MASK = re.compile(r"Bidirec|EncoderModel$")  # in names of classes that exist only in their repository


def sees_whole_texts(config: Config, family: Family) -> bool:
    """Return True if a config says that attention has no mask.

    Raises UnsupportedModelError if only a class name says so, because `transformers` itself would not read it.
    """
    given = config.get(_BIDIRECTIONAL)
    if _BIDIRECTIONAL not in family.reads and given not in (None, False, _OF_IMAGES):
        raise UnsupportedModelError(
            f"{_BIDIRECTIONAL}={given!r:.60} is not supported for {config['model_type']}: use a model of gemma3_text"
        )
    is_whole = not flag({"is_causal": True, **config}, "is_causal") or _is_bidirectional(config, family)
    _check_classes(config, is_whole=is_whole)
    return is_whole


def without_mask(architecture: Architecture, config: Config, family: Family) -> Architecture:
    """Return the network without a mask, and without the parts after the last states.

    Raises UnsupportedModelError for parts that have no kernels without a mask.
    """
    parts = unusual_parts(architecture.layers) | ({"ropes of two lengths"} if architecture.long_ropes else set())
    if parts:
        raise UnsupportedModelError(
            f"{architecture.family} without a mask is not supported with {', '.join(sorted(parts))}: "
            "use a model with usual attention and dense feed-forwards"
        )
    layers = tuple(_without_mask(layer, config, family) for layer in architecture.layers)
    return replace(architecture, layers=layers, tied_embeddings=True, logit_scale=1.0, logit_softcap=None)


def _without_mask(layer: Layer, config: Config, family: Family) -> Layer:
    mixer = layer.mixer
    assert isinstance(mixer, Attention)
    window = mixer.window
    if window is not None and _is_bidirectional(config, family):
        window = window // 2 + 1
    if window is not None and config.get("is_causal") is False:
        window += 1
    return replace(layer, mixer=replace(mixer, is_causal=False, window=window))


def _is_bidirectional(config: Config, family: Family) -> bool:
    return _BIDIRECTIONAL in family.reads and flag(config, _BIDIRECTIONAL)


def _check_classes(config: Config, *, is_whole: bool) -> None:
    """Raise UnsupportedModelError for a class without a mask whose config has one, or for a class with other parts."""
    names = config.get("architectures")
    for name in names if isinstance(names, list) else ():
        if _WITHOUT_MASK.search(str(name)) and not (is_whole and str(name).endswith("Model")):
            raise UnsupportedModelError(
                f"architectures={str(name)!r:.60} is not supported: its attention has no mask, and its code is never "
                "run: use a model whose config.json has is_causal=false and no head"
            )
