"""The tensor of a GGUF file that contains one of our matrices, as exported by `tensors`."""

import re
from typing import NamedTuple

from infer.files.gguf.forms import form_of
from infer.files.tensors.fused_tensors import FUSED
from infer.files.tensors.tensor_names import name_in_gguf

_MATRIX = re.compile(r"(model\.layers\.[0-9]+\.)(?:mlp\.experts\.([0-9]+)\.)?(.+)\.weight")
_PARTS = {part: fused for fused, parts in FUSED.items() for part in parts}


class PlaceInGGUF(NamedTuple):
    """A tensor, and the index of the matrix in it: the expert's number, or 0."""

    tensor: str
    matrix: int = 0


def place_in_gguf(name: str, architecture: str) -> PlaceInGGUF | None:
    """Return the place of a layer's matrix, or None if GGUF has no name for it.

    Args:
        name: Our name of the matrix.
        architecture: The architecture's name in GGUF.
    """
    match = _MATRIX.fullmatch(name)
    if match is None:
        return None
    module = match[3] if match[2] is None else f"mlp.experts.{match[3]}"
    form = form_of(architecture)
    if _PARTS.get(module) in form.fused:
        module = _PARTS[module]
    if form.has_gates_in_q and module == "self_attn.gate_proj":
        module = "self_attn.q_proj"
    ours = f"{match[1]}{module}.weight"
    stored = name_in_gguf(ours, form.names)
    return None if stored is None else PlaceInGGUF(stored, int(match[2] or 0))
