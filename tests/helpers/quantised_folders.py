"""Folders of GPTQ, AWQ and other methods, made from a folder of floats, and the numbers that they stand for.

Each `pack` follows the layout that the method publishes, code by code. `values` are computed from codes, zero points
and scales before they are packed, so they do not depend on how anything is unpacked.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

_E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])
_AWQ_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)  # column of each nibble of a word, of eight
_IN_FLOATS = ("lm_head", "model.layers.0.mlp.down_proj")  # modules that are not quantised


class Packed(NamedTuple):
    tensors: dict[str, Tensor]  # tensors of a module, by the last part of their names
    values: Tensor  # the values that they stand for, in float32


Pack = Callable[[Tensor], Packed]


class Method(NamedTuple):
    name: str
    config: dict[str, Any]
    pack: Pack
    type: str  # type in which the kernels store the matrix
    key: str = "quantization_config"

    @property
    def is_exact(self) -> bool:
        return self.type != "F16"


class Integers(NamedTuple):
    codes: Tensor  # [rows, columns], from 0
    zeros: Tensor  # [rows, groups]
    scales: Tensor  # [rows, groups], in half precision
    values: Tensor


def quantized(weight: Tensor, bits: int, index: Tensor, *, is_symmetric: bool) -> Integers:
    """Return the nearest codes. index: the group of each column."""
    middle = 1 << (bits - 1)
    scales, zeros = list[Tensor](), list[Tensor]()
    for group in range(int(index.max()) + 1):
        part = weight[:, index == group]
        if is_symmetric:
            scales.append(part.abs().amax(1) / (middle - 0.5))
            zeros.append(torch.full((len(weight),), middle))
        else:
            low, high = part.amin(1).clamp(max=0), part.amax(1).clamp(min=0)
            scales.append((high - low) / ((1 << bits) - 1))
            zeros.append((-low / scales[-1]).round().clamp(1, (1 << bits) - 1).int())
    scale, zero = torch.stack(scales, 1).bfloat16().half(), torch.stack(zeros, 1)
    codes = (weight / scale.float()[:, index] + zero[:, index]).round().clamp(0, (1 << bits) - 1).int()
    return Integers(codes, zero, scale, (codes - zero[:, index]) * scale.float()[:, index])


def words(codes: Tensor, bits: int) -> Tensor:
    """Return rows of words of 32 bits, with codes one after another from the lowest bit on."""
    found = torch.zeros(len(codes), -(-codes.shape[1] * bits // 32) + 1, dtype=torch.int64)
    places = torch.arange(codes.shape[1]) * bits
    shifted = codes.long() << places % 32
    for word, part in ((places // 32, shifted & 0xFFFFFFFF), (places // 32 + 1, shifted >> 32)):
        found.index_add_(1, word, part)
    return torch.from_numpy(found[:, :-1].numpy().astype("uint32").view("int32"))


def awq_words(codes: Tensor) -> Tensor:
    """Return AWQ's words of eight neighbouring codes of a row."""
    groups = codes.reshape(len(codes), -1, 8)[:, :, list(_AWQ_COLUMNS)].long()
    found = (groups << 4 * torch.arange(8)).sum(2)
    return torch.from_numpy(found.numpy().astype("uint32").view("int32"))


def groups_of(weight: Tensor, size: int, *, has_order: bool = False) -> Tensor:
    """Return the group of each column, in the order of the columns or in one of their activations."""
    index = torch.arange(weight.shape[1]) // size
    return index[torch.randperm(len(index), generator=torch.Generator().manual_seed(0))] if has_order else index


def gptq(bits: int, group_size: int, *, is_symmetric: bool, lacks: int = 1, has_order: bool = False) -> Pack:
    def pack(weight: Tensor) -> Packed:
        index = groups_of(weight, weight.shape[1] if group_size == -1 else group_size, has_order=has_order)
        found = quantized(weight, bits, index, is_symmetric=is_symmetric)
        tensors = {"qweight": words(found.codes, bits).T, "qzeros": words(found.zeros.T - lacks, bits)}
        return Packed(tensors | {"scales": found.scales.T, "g_idx": index.int()}, found.values)

    return pack


def gptq_config(bits: int, group_size: int, *, is_symmetric: bool, **others: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": bits, "group_size": group_size, "sym": is_symmetric, **others}


def awq(group_size: int) -> Pack:
    def pack(weight: Tensor) -> Packed:
        found = quantized(weight, 4, groups_of(weight, group_size), is_symmetric=False)
        tensors = {"qweight": awq_words(found.codes.T), "qzeros": awq_words(found.zeros.T), "scales": found.scales.T}
        return Packed(tensors, found.values)

    return pack


def packed_integers(bits: int, group_size: int, *, is_symmetric: bool, has_order: bool = False) -> Pack:
    """Return a function that packs as `pack-quantized`, which adds half of the range to codes and zero points."""

    def pack(weight: Tensor) -> Packed:
        index = groups_of(weight, group_size or weight.shape[1], has_order=has_order)
        found = quantized(weight, bits, index, is_symmetric=is_symmetric)
        tensors = {"weight_packed": words(found.codes, bits), "weight_scale": found.scales.bfloat16()}
        tensors["weight_shape"] = torch.tensor(weight.shape)
        if not is_symmetric:
            tensors["weight_zero_point"] = words(found.zeros.T, bits).T
        if has_order:
            tensors["weight_g_idx"] = index.int()
        return Packed(tensors, found.values)

    return pack


def plain_integers(*, is_symmetric: bool) -> Pack:
    """Return a function that packs as `int-quantized` of compressed-tensors: signed bytes, with one scale per row."""

    def pack(weight: Tensor) -> Packed:
        found = quantized(weight, 8, groups_of(weight, weight.shape[1]), is_symmetric=is_symmetric)
        tensors = {"weight": (found.codes - 128).to(torch.int8), "weight_scale": found.scales.bfloat16()}
        if not is_symmetric:
            tensors["weight_zero_point"] = (found.zeros - 128).to(torch.int8)
        return Packed(tensors, found.values)

    return pack


def compressed_config(format_: str, *weights: dict[str, Any]) -> dict[str, Any]:
    groups = {f"group_{index}": {"targets": ["Linear"], "weights": each} for index, each in enumerate(weights)}
    found = {"quant_method": "compressed-tensors", "format": format_, "quantization_status": "compressed"}
    return found | {"config_groups": groups, "ignore": list(_IN_FLOATS)}


def integers(bits: int, group_size: int | None, *, is_symmetric: bool) -> dict[str, Any]:
    strategy = "channel" if group_size is None else "group"
    found = {"num_bits": bits, "type": "int", "symmetric": is_symmetric}
    return found | {"strategy": strategy, "group_size": group_size}


def fp8(block: tuple[int, int] | None, name: str, dtype: torch.dtype) -> Pack:
    """Return a function that packs as FP8. A block of `(1, 0)` is a row, and None is the whole matrix."""

    def pack(weight: Tensor) -> Packed:
        rows, columns = block or (len(weight), weight.shape[1])
        columns = columns or weight.shape[1]
        parts = [[part.abs().max() for part in row.split(columns, 1)] for row in weight.split(rows)]
        scales = torch.tensor(parts) / 448
        if dtype == torch.uint8:  # exponents
            stored = (scales.log2().ceil() + 127).to(torch.uint8)
            scales = torch.exp2(stored.float() - 127)
        else:
            stored = scales.to(dtype)
            scales = stored.float()
        spread = scales.repeat_interleave(rows, 0)[: len(weight)].repeat_interleave(columns, 1)[:, : weight.shape[1]]
        codes = (weight / spread).clamp(-448, 448).to(torch.float8_e4m3fn)
        stored = stored.reshape(()) if block is None else stored
        return Packed({"weight": codes, name: stored}, codes.float() * spread)

    return pack


def _fp4_codes(scaled: Tensor) -> Tensor:
    return (scaled[..., None] - _E2M1).abs().argmin(-1)


def nvfp4(names: tuple[str, str], *, divides: bool) -> Pack:
    """Return a function that packs as FP4, with FP8 scales and a factor. `names` are those of codes and factor."""

    def pack(weight: Tensor) -> Packed:
        parts = weight.reshape(len(weight), -1, 16)
        factor = parts.abs().max() / 6 / 448
        scales = (parts.abs().amax(2) / 6 / factor).to(torch.float8_e4m3fn)
        stored = 1 / factor if divides else factor
        spread = scales.double()[:, :, None] * (1 / stored.double() if divides else stored.double())
        codes = _fp4_codes(parts / spread.clamp(min=1e-9))
        values = (_E2M1[codes] * spread).float().reshape(weight.shape)
        codes = codes.reshape(weight.shape).to(torch.uint8)
        tensors = {names[0]: codes[:, ::2] | codes[:, 1::2] << 4, "weight_scale": scales, names[1]: stored.reshape(1)}
        return Packed(tensors, values)

    return pack


def mxfp4(weight: Tensor) -> Packed:
    parts = weight.reshape(len(weight), -1, 32)
    exponents = (parts.abs().amax(2) / 6).log2().ceil().clamp(-126, 127)
    spread = torch.exp2(exponents)[:, :, None]
    codes = _fp4_codes(parts / spread)
    values = (_E2M1[codes] * spread).reshape(weight.shape)
    codes = codes.reshape(weight.shape).to(torch.uint8)
    pairs = codes[:, ::2] | codes[:, 1::2] << 4
    return Packed({"weight_packed": pairs, "weight_scale": (exponents + 127).to(torch.uint8)}, values)


def mlx(bits: int, group_size: int) -> Pack:
    def pack(weight: Tensor) -> Packed:
        parts = weight.reshape(len(weight), -1, group_size)
        low, high = parts.aminmax(dim=2)
        scales, biases = ((high - low) / ((1 << bits) - 1)).half(), low.half()
        codes = ((parts - biases.float()[:, :, None]) / scales.float()[:, :, None]).round().clamp(0, (1 << bits) - 1)
        values = codes * scales.float()[:, :, None] + biases.float()[:, :, None]
        tensors = {"weight": words(codes.reshape(weight.shape).int(), bits).view(torch.uint32)}
        return Packed(tensors | {"scales": scales, "biases": biases}, values.reshape(weight.shape))

    return pack


_FLOATS_OF_8_BITS = {"num_bits": 8, "type": "float", "symmetric": True}
_FP4 = {"num_bits": 4, "type": "float", "symmetric": True, "strategy": "tensor_group", "group_size": 16}
_MXFP4 = {"num_bits": 4, "type": "float", "symmetric": True, "strategy": "group", "group_size": 32}
_MXFP4 |= {"scale_dtype": "torch.uint8"}


def _gptq(name: str, type_: str, bits: int, group_size: int, **settings: Any) -> Method:
    """Return a method of GPTQ. `settings` are those of `gptq`; the config has what follows from them."""
    others = {"desc_act": True} if "has_order" in settings else {}
    if not settings["is_symmetric"]:
        others["checkpoint_format"] = "gptq_v2" if "lacks" in settings else "gptq"
    config = gptq_config(bits, group_size, is_symmetric=settings["is_symmetric"], **others)
    return Method(name, config, gptq(bits, group_size, **settings), type_)


def _packed(name: str, type_: str, bits: int, group_size: int | None, *, is_symmetric: bool, **order: bool) -> Method:
    config = compressed_config("pack-quantized", integers(bits, group_size, is_symmetric=is_symmetric))
    return Method(name, config, packed_integers(bits, group_size or 0, is_symmetric=is_symmetric, **order), type_)


def _compressed(name: str, type_: str, weights: dict[str, Any], pack: Pack) -> Method:
    """Return a method of compressed-tensors, whose format is the first word of its name."""
    return Method(name, compressed_config(name.partition(" ")[0], weights), pack, type_)


def _fp8(name: str, type_: str, pack: Pack, **config: Any) -> Method:
    return Method(name, {"quant_method": "fp8", "modules_to_not_convert": list(_IN_FLOATS), **config}, pack, type_)


_AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}
_WHOLE_ROWS, _UNEVEN_ROWS = (integers(8, None, is_symmetric=is_symmetric) for is_symmetric in (True, False))
_NAMES_OF_FP4 = ("weight_packed", "weight_global_scale")
_BLOCKS = _FLOATS_OF_8_BITS | {"strategy": "block", "block_structure": [32, 128]}
_ROWS = _FLOATS_OF_8_BITS | {"strategy": "channel"}
_MODELOPT = {"quant_method": "modelopt", "quant_algo": "NVFP4", "exclude_modules": list(_IN_FLOATS)}
METHODS = (
    _gptq("gptq symmetric", "Q4_0", 4, 128, is_symmetric=True),
    _gptq("gptq zero points", "Q5_0", 4, 32, is_symmetric=False),
    _gptq("gptq_v2", "Q5_0", 4, 64, is_symmetric=False, lacks=0),
    _gptq("gptq act-order", "F16", 4, 32, is_symmetric=True, has_order=True),
    _gptq("gptq whole rows", "Q4_0", 4, -1, is_symmetric=True),
    _gptq("gptq 2 bits", "Q4_0", 2, 32, is_symmetric=False),
    _gptq("gptq 3 bits", "Q4_0", 3, 32, is_symmetric=True),
    _gptq("gptq 8 bits", "Q8_0", 8, 32, is_symmetric=True),
    _gptq("gptq 8 bits, zero points", "F16", 8, 32, is_symmetric=False),
    Method("awq", _AWQ, awq(128), "Q5_0"),
    _packed("pack-quantized", "Q4_0", 4, 32, is_symmetric=True),
    _packed("pack-quantized zero points", "Q5_0", 4, 128, is_symmetric=False),
    _packed("pack-quantized act-order", "F16", 4, 32, is_symmetric=True, has_order=True),
    _packed("pack-quantized rows of 8 bits", "Q8_0", 8, None, is_symmetric=True),
    _compressed("int-quantized", "Q8_0", _WHOLE_ROWS, plain_integers(is_symmetric=True)),
    _compressed("int-quantized zero points", "F16", _UNEVEN_ROWS, plain_integers(is_symmetric=False)),
    _fp8("fp8 blocks", "F16", fp8((64, 32), "weight_scale_inv", torch.float32), weight_block_size=[64, 32]),
    _fp8("fp8 blocks of exponents", "F8_E4M3", fp8((128, 128), "weight_scale_inv", torch.uint8), scale_fmt="ue8m0"),
    _fp8("fp8 matrices", "F8_E4M3", fp8(None, "weight_scale_inv", torch.bfloat16), weight_block_size=None),
    Method("fbgemm_fp8", {"quant_method": "fbgemm_fp8"}, fp8((1, 0), "weight_scale", torch.float32), "F8_E4M3"),
    _compressed("float-quantized", "F8_E4M3", _ROWS, fp8((1, 0), "weight_scale", torch.bfloat16)),
    _compressed("float-quantized blocks", "F8_E4M3", _BLOCKS, fp8((32, 128), "weight_scale", torch.bfloat16)),
    _compressed("nvfp4-pack-quantized", "NVFP4_SCALED", _FP4, nvfp4(_NAMES_OF_FP4, divides=True)),
    Method("modelopt nvfp4", _MODELOPT, nvfp4(("weight", "weight_scale_2"), divides=False), "NVFP4_SCALED"),
    _compressed("mxfp4-pack-quantized", "MXFP4", _MXFP4, mxfp4),
    Method("mlx", {"bits": 4, "group_size": 64, "mode": "affine"}, mlx(4, 64), "Q4_1", "quantization"),
    Method("mlx 8 bits", {"bits": 8, "group_size": 32}, mlx(8, 32), "F16", "quantization"),
)


def is_quantised(name: str, tensor: Tensor) -> bool:
    """Return True for the matrices of attention and feed-forwards, except for the first layer's down."""
    return name.endswith("_proj.weight") and tensor.dim() == 2 and name.removesuffix(".weight") not in _IN_FLOATS


def write_quantised(floats: Path, folder: Path, pack: Pack, config: dict[str, Any], key: str) -> dict[str, Tensor]:
    """Write the folder of floats with its matrices packed, and return the values that all tensors stand for."""
    shutil.copytree(floats, folder, dirs_exist_ok=True)
    tensors = load_file(floats / "model.safetensors")
    meant = dict(tensors)
    for name in [name for name, tensor in tensors.items() if is_quantised(name, tensor)]:
        packed = pack(tensors.pop(name).float())
        meant[name] = packed.values
        tensors |= {f"{name.removesuffix('weight')}{kind}": each for kind, each in packed.tensors.items()}
    save(folder, tensors)
    set_config(folder, key, config)
    return meant


def save(folder: Path, tensors: dict[str, Tensor]) -> None:
    save_file({name: each.contiguous() for name, each in tensors.items()}, folder / "model.safetensors")


def set_config(folder: Path, key: str, value: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}))


def by_name(name: str) -> Method:
    return next(method for method in METHODS if method.name == name)
