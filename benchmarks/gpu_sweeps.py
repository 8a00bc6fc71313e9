"""`check_gpu`'s section on constants of the kernels: the time of products with other values of each of them.

A constant is replaced in `projection`, where it is read at each launch. If the kernels no longer have it, the section
says so. Each line also has whether the bits stay those of the present value.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, final

import torch

from gpu_weights import many_matrices, product_of_each, replayed
from infer.compute.backends.cuda import projection


@final
class Sweep(NamedTuple):
    name: str  # name of a constant of `projection`
    key: str  # key of an entry if the constant is a tile, otherwise ""
    values: tuple[int, ...]
    types: tuple[str, ...]
    tokens: tuple[int, ...]


SWEEPS = (
    Sweep("FEW_TOKENS", "", (8, 16, 32), ("Q4_K", "Q8_0", "Q4_0"), (9, 16, 32)),
    Sweep("DENSE_TILE", "num_stages", (2, 3, 4, 6), ("BF16",), (1, 16, 64, 512)),
    Sweep("DENSE_TILE", "ROWS", (16, 32, 64), ("BF16",), (1, 16, 512)),
    Sweep("MATVEC_TILE", "ROWS", (1, 2, 4), ("Q4_K", "Q6_K", "Q8_0"), (1, 8)),
    Sweep("MATMUL_TILE", "num_stages", (1, 2, 3), ("Q4_K", "Q8_0"), (64, 512)),
)
TINY = (Sweep("FEW_TOKENS", "", (1, 8), ("Q4_0",), (2,)), Sweep("MATVEC_TILE", "ROWS", (2, 4), ("Q4_0",), (1,)))


def sweep_constants(device: torch.device, is_tiny: bool) -> Iterator[dict[str, Any]]:
    """Yield the microseconds of each value of each constant. A launch that fails is a line with its error."""
    rows, columns, sweeps = (8, 256, TINY) if is_tiny else (8192, 2048, SWEEPS)
    for sweep in sweeps:
        what = {"constant": sweep.name, "entry": sweep.key}
        if not _is_there(sweep):
            yield what | {"skipped": "the kernels have no such constant"}
            continue
        for type_ in sweep.types:
            matrices = many_matrices(type_, rows, columns, device)
            for tokens in sweep.tokens:
                launch = product_of_each(matrices, tokens, device)
                expected = launch()
                for value in sweep.values:
                    line = what | {"value": value, "present": _present(sweep), "type": type_, "tokens": tokens}
                    with replaced(sweep, value):
                        try:
                            has_same_bits = torch.equal(launch(), expected)
                            line |= {"microseconds": replayed(launch, len(matrices), device)}
                            line |= {"has_same_bits": has_same_bits}
                        except Exception as error:  # such a tile may need more than the device has
                            line |= {"error": f"{type(error).__name__}: {str(error)[:200]}"}
                    yield line


def _is_there(sweep: Sweep) -> bool:
    value = getattr(projection, sweep.name, None)
    return isinstance(value, dict) if sweep.key else isinstance(value, int)


def _present(sweep: Sweep) -> Any:
    """Return the present value, or None if it is Triton's default."""
    value = getattr(projection, sweep.name)
    return value.get(sweep.key) if sweep.key else value


@contextmanager
def replaced(sweep: Sweep, value: int) -> Iterator[None]:
    """Replace the constant while the context runs."""
    before = getattr(projection, sweep.name)
    setattr(projection, sweep.name, {**before, sweep.key: value} if sweep.key else value)
    try:
        yield
    finally:
        setattr(projection, sweep.name, before)
