"""Checked values of a GGUF file's metadata. A ModelFormatError names the key, the rule and the value."""

import math
import re
from typing import Any, NoReturn

import numpy as np

from infer.errors import ModelFormatError, UnsupportedModelError
from infer.files.gguf.gguf import GGUFFile

_LARGEST = float(np.finfo(np.float32).max)


class GGUFValues:
    """The metadata under the architecture's name."""

    def __init__(self, file: GGUFFile) -> None:
        if not file.tensors:
            raise ModelFormatError(file.path, "tensor count", "expected weights, got only a vocabulary")
        self.file = file
        architecture = file.metadata.get("general.architecture")
        if not isinstance(architecture, str) or not re.fullmatch(r"[a-zA-Z0-9_.-]{1,64}", architecture):
            raise ModelFormatError(file.path, "general.architecture", f"expected a name, got {architecture!r:.80}")
        self.architecture = architecture

    def has(self, key: str) -> bool:
        return f"{self.architecture}.{key}" in self.file.metadata

    def get(self, key: str, default: Any = None) -> Any:
        return self.file.metadata.get(f"{self.architecture}.{key}", default)

    def count(
        self,
        key: str,
        default: int | None = None,
        most: int = (1 << 31) - 1,
        *,
        skips_zeros: bool = False,
        may_differ: bool = False,
    ) -> int:
        """Return an integer from 1 to `most`. A list with the same value for every layer counts as that value.

        skips_zeros: Zeros in a list are ignored, because they belong to layers of another kind.
        may_differ: A list counts as its first value, because other settings are made from the whole list.
        """
        value = self.get(key, default)
        if skips_zeros and isinstance(value, list):
            value = [entry for entry in value if entry != 0] or default
        if isinstance(value, list) and value:
            if not may_differ and any(entry != value[0] for entry in value):
                self.unsupported(key)
            value = value[0]
        if value is None:
            self.fail(key, "is missing")
        if type(value) is not int or not 1 <= value <= most:
            self.fail(key, f"expected an integer from 1 to {most}, got {value!r:.60}")
        return value

    def real(self, key: str, default: float | None = None) -> float:
        value = self.get(key, default)
        if value is None:
            self.fail(key, "is missing")
        if not isinstance(value, float):
            self.fail(key, f"expected a float, got {value!r:.60}")
        return float(shortest(value))

    def check_length(self, key: str, given: list[Any], num_layers: int) -> None:
        """Raise ModelFormatError for a list without a value per layer."""
        if len(given) != num_layers:
            self.fail(key, f"expected a number for each of {num_layers} layers, got {len(given)}")

    def unsupported(self, key: str) -> NoReturn:
        name = f"{self.architecture}.{key}"
        raise UnsupportedModelError(f"{self.file.path.name}: {name} differs between layers, which is not supported")

    def fail(self, key: str, problem: str) -> NoReturn:
        raise ModelFormatError(self.file.path, f"{self.architecture}.{key}", problem)


def rotated_share(num_rotated: int, head_dim: int) -> float:
    """Return the rotating share of a head, whose product with `head_dim` is at least `num_rotated`."""
    share = num_rotated / head_dim
    return share if int(head_dim * share) == num_rotated else math.nextafter(share, 2.0)


def shortest(value: Any) -> Any:
    """Return a float32 as its shortest decimal: 1e-05 instead of its double, 9.999999747378752e-06."""
    if isinstance(value, float) and abs(value) <= _LARGEST and float(np.float32(value)) == value:
        return float(str(np.float32(value)))
    return value
