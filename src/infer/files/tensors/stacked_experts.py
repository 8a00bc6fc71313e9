"""Stacks: tensors with the matrices or biases of all experts. They are split here, for each layout in files.

    [experts, rows, columns]            in most files; if gate and up are in one tensor, gate's rows come first
    [experts, columns, rows]            gpt-oss and Llama 4 in floats
    codes [experts, rows, blocks, 16],  gpt-oss in MXFP4
    scales [experts, rows, blocks]

In gpt-oss's folders, rows of gate and up alternate.
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from math import prod
from typing import NamedTuple

from infer.compute.operands.feed_forwards import MAX_EXPERTS
from infer.compute.quantization.ggml_types import BLOCK_TYPES
from infer.files.tensors.tensor_info import TensorInfo

_STACK = re.compile(r"(model\.layers\.[0-9]+\.mlp\.experts)\.(gate|up|gate_up|down)_proj")
_MXFP4, _CODES_BYTES = BLOCK_TYPES["MXFP4"], 16  # bytes of a block's codes; the scale has one byte more


class StackOrder(NamedTuple):
    are_transposed: bool = False  # True if matrices of floats are transposed
    are_interleaved: bool = False  # True if rows of gate and up alternate


PLAIN = StackOrder()


def is_stack(module: str) -> bool:
    """Return True if a tensor of this name, without its ending, is a stack."""
    return _STACK.fullmatch(module) is not None


def each_expert(info: TensorInfo, module: str, kind: str, order: StackOrder) -> dict[str, TensorInfo]:
    """Return each expert's part of a stack, by our names. `kind` is weight or bias."""
    match = _STACK.fullmatch(module)
    assert match is not None
    names = ("gate", "up") if match[2] == "gate_up" else (match[2],)
    _check(info, kind)
    is_transposed = order.are_transposed and kind == "weight" and info.scales is None
    num_experts, all_rows = info.shape[0], info.shape[2 if is_transposed else 1]
    if all_rows % len(names):
        info.fail(f"expected the same number of rows of gate and up, got the shape {info.shape}")
    size, parts, stack = all_rows // len(names), dict[str, TensorInfo](), _one_matrix(info)
    for index, name in enumerate(names):
        rows = range(index, all_rows, len(names)) if order.are_interleaved else range(index * size, (index + 1) * size)
        for expert in range(num_experts):
            first = expert * info.shape[1]
            if is_transposed:
                part = stack.rows(range(first, first + info.shape[1])).transposed.rows(rows)
            else:
                part = stack.rows(range(first + rows.start, first + rows.stop, rows.step))
            if info.factor is not None:
                part = replace(part, factor=info.factor.rows(range(expert, expert + 1)))
            parts[f"{match[1]}.{expert}.{name}_proj.{kind}"] = part
    return parts


def _one_matrix(info: TensorInfo) -> TensorInfo:
    """Return a stack as one matrix, or as one vector of biases, with the rows of all experts."""
    num_rows, scales = info.shape[0] * info.shape[1], info.scales
    scales = None if scales is None else replace(scales, shape=(num_rows, *scales.shape[2:]))
    return replace(info, shape=(num_rows, *info.shape[2:]), scales=scales)


def _check(info: TensorInfo, kind: str) -> None:
    if len(info.shape) != (2 if kind == "bias" else 3):
        info.fail(f"expected a tensor of experts, rows and columns, got the shape {info.shape}")
    if info.shape[0] > MAX_EXPERTS:
        info.fail(f"expected at most {MAX_EXPERTS} experts, got {info.shape[0]}")


def with_joined_scales(tensors: Mapping[str, TensorInfo]) -> dict[str, TensorInfo]:
    """Return the tensors with MXFP4's codes and scales, which are separate in gpt-oss's folders, as one tensor.

    Raises ModelFormatError if one of the two is missing, or if their shapes disagree.
    """
    found: dict[str, TensorInfo] = {}
    for name, info in tensors.items():
        module, _, kind = name.rpartition(".")
        if kind not in ("blocks", "scales") or not is_stack(module):
            found[name] = info
            continue
        codes, scales = tensors.get(f"{module}.blocks"), tensors.get(f"{module}.scales")
        if codes is None or scales is None:
            info.fail(f"expected a tensor of its {'blocks' if codes is None else 'scales'} next to it")
        for each in (codes, scales):
            if each.type != "U8":
                each.fail(f"expected bytes (U8), got {each.type}")
        if f"{module}.weight" in tensors:
            codes.fail(f"is the same weight as {tensors[f'{module}.weight'].name!r:.80}")
        if len(scales.shape) != 3:
            scales.fail(f"expected a tensor of experts, rows and blocks, got the shape {scales.shape}")
        joined = *scales.shape[:2], scales.shape[2] * _CODES_BYTES  # the shape that `transformers` may write
        if codes.shape not in ((*scales.shape, _CODES_BYTES), joined):
            codes.fail(f"expected the shape of its scales {scales.shape} and {_CODES_BYTES}, got {codes.shape}")
        shape = *scales.shape[:2], scales.shape[2] * _MXFP4.block_size
        num_bytes = prod(scales.shape) * _MXFP4.block_bytes
        found[f"{module}.weight"] = replace(codes, type="MXFP4", shape=shape, num_bytes=num_bytes, scales=scales)
    return found
