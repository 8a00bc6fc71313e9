"""Scales of NVFP4 matrices in GGUF files, which are separate tensors next to the blocks.

    MODULE.weight       blocks of NVFP4    [rows, columns]    or of experts    [experts, rows, columns]
    MODULE.scale        F32                [1]                                 [experts]
    MODULE.input_scale  scale of the activations, which are not quantised here

llama.cpp multiplies a matrix's product by its scale. Files converted from ModelOpt or compressed-tensors have a scale.
"""

from collections.abc import Mapping
from dataclasses import replace

from infer.files.tensors.tensor_info import TensorInfo


def with_factors(tensors: Mapping[str, TensorInfo], *, has_expert_scales: bool) -> dict[str, TensorInfo]:
    """Return the tensors of a file with each scale as the `factor` of its matrix, and without scales of activations.

    If the architecture `has_expert_scales`, the scales of `ffn_down_exps` belong to the router. Raises ModelFormatError
    for a scale of another type or shape.
    """
    found = dict(tensors)
    for name, matrix in tensors.items():
        module, _, kind = name.rpartition(".")
        if kind != "weight" or matrix.type != "NVFP4":
            continue
        found.pop(f"{module}.input_scale", None)
        if f"{module}.scale" not in found or (has_expert_scales and module.endswith(".ffn_down_exps")):
            continue
        scale, shape = found.pop(f"{module}.scale"), matrix.shape[:-2] or (1,)
        if scale.type != "F32" or scale.shape != shape:
            scale.fail(f"expected F32 of the shape {shape}, got {scale.type} of {scale.shape}")
        found[name] = replace(matrix, factor=scale)
    return found


def with_scaled_types(tensors: Mapping[str, TensorInfo]) -> dict[str, TensorInfo]:
    """Return the tensors, each matrix with a factor under the type as which it is loaded."""
    return {name: info if info.factor is None else replace(info, type="NVFP4_SCALED") for name, info in tensors.items()}
