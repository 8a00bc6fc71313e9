"""The tensors that an architecture needs, and whether a model's files have them. Loads no torch."""

from collections.abc import Mapping
from typing import Protocol, runtime_checkable

from infer.errors import ModelError
from infer.operands.architecture import Architecture

_MAX_LISTED = 20


@runtime_checkable
class Shaped(Protocol):
    @property
    def shape(self) -> tuple[int, ...]: ...


def expected_shapes(architecture: Architecture) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor that the architecture needs, by canonical name."""
    hidden, vocab = architecture.hidden_size, architecture.vocab_size
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, hidden), "model.norm.weight": (hidden,)}
    if not architecture.tied_embeddings:
        shapes["lm_head.weight"] = (vocab, hidden)
    for index, layer in enumerate(architecture.layers):
        shapes |= {f"model.layers.{index}.{name}": shape for name, shape in layer.shapes(hidden).items()}
    return shapes


def check_tensors(expected: Mapping[str, tuple[int, ...]], found: Mapping[str, Shaped]) -> None:
    """Raise ModelError that lists every missing, extra and misshapen tensor, twenty at most."""
    allowed_extra = {"lm_head.weight"}  # some files store a tied head a second time
    problems = [f"missing {name} {expected[name]}" for name in expected if name not in found]
    problems += [f"unexpected {name!r:.80}" for name in found if name not in expected and name not in allowed_extra]
    for name, shape in expected.items():
        if name in found and tuple(found[name].shape) != shape:
            problems.append(f"{name} has shape {tuple(found[name].shape)}, the config requires {shape}")
    if problems:
        more = f"; and {len(problems) - _MAX_LISTED} more" if len(problems) > _MAX_LISTED else ""
        raise ModelError(f"config and tensors disagree: {'; '.join(problems[:_MAX_LISTED])}{more}")
