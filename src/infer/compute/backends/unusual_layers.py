"""The check of devices whose kernels do not compute every part of a layer that a CPU computes."""

from collections.abc import Iterable, Set

from infer.compute.operands.architecture import Layer
from infer.compute.operands.unusual_parts import unusual_parts
from infer.errors import UnsupportedModelError


def check_unusual_parts(layers: Iterable[Layer], device: str, computed: Set[str] = frozenset()) -> None:
    """Raise UnsupportedModelError if a layer has a part of `unusual_parts` that is not in `computed`."""
    if others := unusual_parts(layers) - computed:
        raise UnsupportedModelError(f"device {device} has no kernels for {', '.join(sorted(others))}: use device cpu")
