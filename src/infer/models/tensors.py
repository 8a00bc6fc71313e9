"""The tensors that an architecture needs, and a check that a model's files have them. Loads no torch."""

from collections.abc import Mapping
from typing import Protocol, runtime_checkable

from infer.compute.operands.architecture import Architecture
from infer.compute.operands.mixers import Attention
from infer.errors import ModelError

_MAX_LISTED = 20
_OF_KEYS = ("k_proj", "v_proj", "k_norm", "v_norm")


@runtime_checkable
class Shaped(Protocol):
    @property
    def shape(self) -> tuple[int, ...]: ...


def expected_shapes(architecture: Architecture) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor that the architecture needs, by canonical name."""
    hidden, vocab = architecture.hidden_size, architecture.vocab_size
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, hidden)}
    if architecture.text_inputs is not None:
        shapes |= architecture.text_inputs.shapes(hidden, architecture.norms)
    if architecture.has_last_norm:
        shapes |= architecture.norms.shapes("model.norm", hidden)
    if not architecture.tied_embeddings:
        shapes["lm_head.weight"] = (vocab, hidden)
    if architecture.has_head_bias:
        shapes["lm_head.bias"] = (vocab,)
    if architecture.per_layer_input is not None:
        shapes |= architecture.per_layer_input.model_shapes(hidden, vocab, len(architecture.layers))
    if architecture.has_state_input:
        shapes["model.layers.0.eh_proj.weight"] = (hidden, 2 * hidden)
        for name in ("enorm", "hnorm"):
            shapes |= architecture.norms.shapes(f"model.layers.0.{name}", hidden)
    for index, layer in enumerate(architecture.layers):
        shapes |= {f"model.layers.{index}.{name}": shape for name, shape in layer.shapes(hidden).items()}
    return shapes


def _unused_names(architecture: Architecture) -> set[str]:
    """Return the names of tensors that files may have but no layer uses.

    These are a tied head that is stored twice, and keys and values of layers that attend to those of an earlier layer.
    Cohere's files have biases of zeros, which its code does not read.
    """
    names, norms = {"lm_head.weight"}, architecture.norms
    if norms.are_centred and not norms.have_bias:
        names |= {f"{name.removesuffix('weight')}bias" for name in expected_shapes(architecture)}
    for index, layer in enumerate(architecture.layers):
        if isinstance(layer.mixer, Attention) and not layer.mixer.has_keys:
            names |= {f"model.layers.{index}.self_attn.{part}.weight" for part in _OF_KEYS}
    return names


def check_tensors(architecture: Architecture, found: Mapping[str, Shaped]) -> None:
    """Raise ModelError that lists every missing, extra and misshapen tensor, at most twenty."""
    expected, allowed_extra = expected_shapes(architecture), _unused_names(architecture)
    problems = [f"missing {name} {expected[name]}" for name in expected if name not in found]
    problems += [f"unexpected {name!r:.80}" for name in found if name not in expected and name not in allowed_extra]
    for name, shape in expected.items():
        if name in found and tuple(found[name].shape) != shape:
            problems.append(f"{name} has shape {tuple(found[name].shape)}, the config requires {shape}")
    if problems:
        more = f"; and {len(problems) - _MAX_LISTED} more" if len(problems) > _MAX_LISTED else ""
        raise ModelError(f"config and tensors disagree: {'; '.join(problems[:_MAX_LISTED])}{more}")
