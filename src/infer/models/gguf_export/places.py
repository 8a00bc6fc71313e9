"""The tensor of a GGUF file that contains one of our matrices, as exported by `tensors`."""

import re
from typing import NamedTuple

from infer.files.gguf.gguf_text_encoders import ENCODERS, encoder_name_in_gguf
from infer.files.tensors.tensor_names import name_in_gguf
from infer.models.gguf_export.tensors import (
    WITH_GATES_IN_Q,
    WITH_ONE_BA,
    WITH_ONE_EXPERT_MATRIX,
    WITH_ONE_GATE_UP,
    WITH_ONE_QKV,
)

_MATRIX = re.compile(r"(model\.layers\.[0-9]+\.)(?:mlp\.experts\.([0-9]+)\.)?(.+)\.weight")
_FUSED = (  # architectures with a fused matrix, its name, and its parts
    (WITH_ONE_QKV, "self_attn.qkv_proj", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),
    (WITH_GATES_IN_Q, "self_attn.q_proj", ("self_attn.gate_proj",)),
    (WITH_ONE_GATE_UP, "mlp.gate_up_proj", ("mlp.gate_proj", "mlp.up_proj")),
    (WITH_ONE_EXPERT_MATRIX, "mlp.experts.gate_up_proj", ("mlp.experts.gate_proj", "mlp.experts.up_proj")),
    ({WITH_ONE_BA}, "linear_attn.ba_proj", ("linear_attn.b_proj", "linear_attn.a_proj")),
)


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
    for architectures, fused, parts in _FUSED:
        if architecture in architectures and module in parts:
            module = fused
    ours = f"{match[1]}{module}.weight"
    stored = encoder_name_in_gguf(ours) if architecture in ENCODERS else name_in_gguf(ours, architecture)
    return None if stored is None else PlaceInGGUF(stored, int(match[2] or 0))
