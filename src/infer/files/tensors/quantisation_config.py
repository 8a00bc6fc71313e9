"""How config.json describes the quantisation of a folder's matrices. Methods that are not supported are refused here.

The tensors themselves show which matrices are quantised, and how. Lists of unquantised modules (`ignore`,
`modules_to_not_convert`) and patterns of names are not read. The config is read for facts that tensors do not show, and
for the sizes that the tensors must have.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from infer.errors import ModelFormatError, UnsupportedModelError

INSTEAD = "use the model's bfloat16 safetensors (weights q8 or q4 quantises them at load) or a GGUF of it, such as Q8_0"
_KEYS = ("quantization_config", "compression_config", "quantization")
_PACKED_FORMATS = (
    "pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "nvfp4-pack-quantized",
    "mxfp4-pack-quantized", "mixed-precision",
)  # fmt: skip
_MODELOPT = ("FP8", "NVFP4", "MIXED_PRECISION")
_FP8_BLOCK = (128, 128)
MOST_COLUMNS = 1 << 24  # limit of a matrix, so that wrong sizes stay small


@dataclass(frozen=True)
class Quantisation:
    """Settings of the method that quantised a folder's matrices.

    `sizes` are the possible pairs of bits and of columns per scale of integers; 0 columns means a whole row.
    """

    method: str = ""
    sizes: frozenset[tuple[int, int]] = frozenset()  # empty: any sizes, as in the shapes of the tensors
    is_symmetric: bool = False  # GPTQ: all zero points are the middle of the codes
    zeros_lack: int = 0  # to add to GPTQ's stored zero points
    block: tuple[int, int] = _FP8_BLOCK  # rows and columns that share a scale of FP8
    sizes_by_module: Mapping[str, tuple[int, int]] | None = None  # MLX: the sizes of modules that differ

    def one_size(self) -> tuple[int, int] | None:
        """Return the only pair of bits and columns per scale, or None if several are possible."""
        return next(iter(self.sizes)) if len(self.sizes) == 1 else None


def quantisation_of(folder: Path, config: Mapping[str, Any]) -> Quantisation:
    """Return the quantisation of a folder. It has no method if the config names none.

    Raises UnsupportedModelError for an unsupported method or format, and ModelFormatError for a broken value.
    """
    key = next((key for key in _KEYS if config.get(key)), None)
    if key is None:
        return Quantisation()
    values = _Values(folder, key, config[key])
    _check_methods(folder, config)
    if "quant_method" not in values.found and isinstance(config.get("quantization"), dict):
        return _mlx(_Values(folder, "quantization", config["quantization"]))
    method = values.found.get("quant_method")
    read = _READERS.get(method) if isinstance(method, str) else None
    if read is None:
        named = method or "a method that config.json does not name"
        raise UnsupportedModelError(
            f"{folder.name}: the weights are quantised by {named!s:.60}, which is not supported "
            f"({', '.join(_READERS)} and MLX are): {INSTEAD}"
        )
    return read(values)


def _check_methods(folder: Path, config: Mapping[str, Any]) -> None:
    """Raise UnsupportedModelError if two objects of a config name different methods."""
    found = {key: config[key].get("quant_method") for key in _KEYS if isinstance(config.get(key), dict)}
    named = {key: method for key, method in found.items() if method}
    if any(method != next(iter(named.values())) for method in named.values()):
        each = " and ".join(f"{key} {method!s:.60}" for key, method in named.items())
        raise UnsupportedModelError(
            f"{folder.name}: config.json names two methods of quantisation, {each}: remove the wrong one, or {INSTEAD}"
        )


class _Values:
    """The object of config.json that describes the quantisation."""

    def __init__(self, folder: Path, key: str, found: Any) -> None:
        self.folder, self.key, self.found = folder, key, found
        if not isinstance(found, dict):
            self.fail("", f"expected an object, got {found!r:.60}")

    def fail(self, name: str, problem: str) -> NoReturn:
        where = f"{self.key}.{name}" if name else self.key
        raise ModelFormatError(self.folder / "config.json", where, problem)

    def choice(self, name: str, choices: tuple[Any, ...], default: Any = None) -> Any:
        """Return a value that must be one of `choices`, or refuse the model."""
        value = self.found.get(name, default)
        if isinstance(value, list | dict) or value not in choices:
            method = self.found.get("quant_method", "MLX")
            known = ", ".join(str(each) for each in choices if each is not None)
            raise UnsupportedModelError(
                f"{self.folder.name}: {self.key}.{name} is {value!r:.60}: of {method}, supported are {known}: {INSTEAD}"
            )
        return choices[choices.index(value)]  # 4 instead of 4.0

    def group_size(self, name: str = "group_size", default: Any = None) -> int:
        """Return the number of columns that share a scale; 0 means a whole row."""
        value = self.found.get(name, default)
        if type(value) is not int or not -1 <= value <= MOST_COLUMNS or value == 0:
            self.fail(name, f"expected -1 or an integer from 1 to {MOST_COLUMNS}, got {value!r:.60}")
        return max(value, 0)

    def part(self, name: str) -> dict[str, Any]:
        value = self.found.get(name) or {}
        if not isinstance(value, dict):
            self.fail(name, f"expected an object, got {value!r:.60}")
        return value


def _gptq(values: _Values) -> Quantisation:
    name = "checkpoint_format" if "checkpoint_format" in values.found else "format"
    version = values.choice(name, ("gptq", "gptq_v2"), "gptq")
    size = values.choice("bits", (2, 3, 4, 8)), values.group_size(default=128)
    sizes = frozenset[tuple[int, int]]() if values.part("dynamic") else frozenset({size})
    is_symmetric = values.choice("sym", (True, False), True)
    return Quantisation("gptq", sizes, is_symmetric, zeros_lack=1 if version == "gptq" else 0)


def _awq(values: _Values) -> Quantisation:
    found = values.found
    for name in ("version", "format"):
        values.choice(name, ("gemm", "GEMM"), "gemm")
    values.choice("zero_point", (True,), True)
    bits = values.choice("w_bit" if "w_bit" in found and "bits" not in found else "bits", (4,), 4)
    group = "q_group_size" if "q_group_size" in found and "group_size" not in found else "group_size"
    return Quantisation("awq", frozenset({(bits, values.group_size(group, 128))}))


def _compressed_tensors(values: _Values) -> Quantisation:
    values.choice("format", _PACKED_FORMATS)
    if values.part("transform_config").get("config_groups"):
        raise UnsupportedModelError(f"{values.folder.name}: transforms of activations are not supported: {INSTEAD}")
    _Values(values.folder, f"{values.key}.sparsity_config", values.part("sparsity_config")).choice(
        "format", ("dense",), "dense"
    )
    sizes, block = set[tuple[int, int]](), _FP8_BLOCK
    for name, group in values.part("config_groups").items():
        of_group = _Values(values.folder, f"{values.key}.config_groups.{name}", group)
        weights = _Values(values.folder, f"{of_group.key}.weights", of_group.part("weights"))
        if weights.found.get("type", "int") == "int" and weights.found:
            bits = weights.choice("num_bits", (2, 4, 8))
            has_group = weights.found.get("group_size") is not None
            sizes.add((bits, weights.group_size() if has_group else 0))
        if (shape := weights.found.get("block_structure")) is not None:
            block = _block(weights, "block_structure", shape)
    return Quantisation("compressed-tensors", frozenset(sizes), block=block)


def _fp8(values: _Values) -> Quantisation:
    shape = values.found.get("weight_block_size")
    values.choice("expert_dtype", ("fp8",), "fp8")
    return Quantisation("fp8", block=_FP8_BLOCK if shape is None else _block(values, "weight_block_size", shape))


def _block(values: _Values, name: str, shape: Any) -> tuple[int, int]:
    sizes = shape if isinstance(shape, list) else []
    if len(sizes) != 2 or not all(type(size) is int and 0 < size <= MOST_COLUMNS for size in sizes):
        values.fail(name, f"expected two integers from 1 to {MOST_COLUMNS}, got {shape!r:.60}")
    return sizes[0], sizes[1]


def _by_tensors(values: _Values) -> Quantisation:
    """Return the quantisation of a method whose tensors define everything."""
    return Quantisation(values.found["quant_method"])


def _modelopt(values: _Values) -> Quantisation:
    values.choice("quant_algo", _MODELOPT)
    return Quantisation("modelopt")


def _mlx(values: _Values) -> Quantisation:
    values.choice("mode", ("affine",), "affine")
    by_module = dict[str, tuple[int, int]]()
    for name, own in values.found.items():
        if isinstance(own, dict):
            by_module[name] = _mlx_size(_Values(values.folder, f"{values.key}.{name:.80}", own))
    return Quantisation("mlx", frozenset({_mlx_size(values)}), sizes_by_module=by_module)


def _mlx_size(values: _Values) -> tuple[int, int]:
    return values.choice("bits", (2, 4, 8)), values.group_size()


_READERS: dict[str, Callable[[_Values], Quantisation]] = {
    "gptq": _gptq,
    "awq": _awq,
    "compressed-tensors": _compressed_tensors,
    "fp8": _fp8,
    "fbgemm_fp8": _by_tensors,
    "modelopt": _modelopt,
    "mxfp4": _by_tensors,
}
