"""Random weights of every type that infer multiplies with."""

import torch

from infer.operands.weights import StoredWeight
from infer.quantization.ggml_types import BLOCK_TYPES

_FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_HALVES_AT = {"Q2_K": (80, 82), "Q3_K": (108,), "Q6_K": (208,), "MXFP4": ()}  # f16 in a block, if not at its start
_WITH_MINIMUM = ("Q4_1", "Q5_1", "Q4_K", "Q5_K")


def make_weight(type_: str, rows: int, columns: int, seed: int = 0) -> StoredWeight:
    """Return random bits, with scales and minima between ± 0.01."""
    generator = torch.Generator().manual_seed(seed)
    if type_ in _FLOATS:
        return StoredWeight(type_, (rows, columns), torch.randn(rows, columns, generator=generator).to(_FLOATS[type_]))
    kind = BLOCK_TYPES[type_]
    blocks = torch.randint(0, 256, (rows * columns // kind.block_size, kind.block_bytes), generator=generator)
    blocks = blocks.to(torch.uint8)
    for at in _HALVES_AT.get(type_, (0, 2) if type_ in _WITH_MINIMUM else (0,)):
        halves = (torch.rand(len(blocks), 1, generator=generator) * 0.02 - 0.01).half()
        blocks[:, at : at + 2] = halves.view(torch.uint8)
    if type_ == "MXFP4":
        blocks[:, 0] = blocks[:, 0] % 8 + 118
    return StoredWeight(type_, (rows, columns), blocks.reshape(rows, -1))
