"""A model before it is loaded, known from its headers. A backend compiles kernels from it. Loads no torch."""

from collections.abc import Mapping
from typing import NamedTuple

from infer.operands.architecture import Architecture


class ModelOutline(NamedTuple):
    architecture: Architecture
    types: Mapping[str, str]  # of the loaded matrices, by name
    kv_type: str
    precision: str  # of the activations: exact or fast
