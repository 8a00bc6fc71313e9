"""Count the kernels of Triton and torch that a GPU would compile and launch. None of them runs."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
from torch.utils._python_dispatch import TorchDispatchMode
from triton._C.libtriton import native_specialize_impl
from triton.backends.compiler import BaseBackend
from triton.runtime.interpreter import InterpretedFunction


class Launch(NamedTuple):
    kernel: str
    variant: tuple[Any, ...] = ()  # Triton compiles one kernel per variant: types, constants, alignment of pointers


@contextmanager
def recorded_launches() -> Iterator[list[Launch]]:
    """Record launches. No kernel runs, so results are uninitialised memory."""
    launches = list[Launch]()

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        launches.append(Launch(self.__name__, _variant(self, args, kwargs)))

    with pytest.MonkeyPatch.context() as patch, _TorchLaunches(launches):
        patch.setattr(InterpretedFunction, "run", run)
        yield launches


def _variant(kernel: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    fixed = set(kernel.kwargs["do_not_specialize"] or ())
    by_name = [*zip(kernel.arg_names, args, strict=False), *sorted(kwargs.items())]
    return tuple(
        (name, value) if name in kwargs else native_specialize_impl(BaseBackend, value, False, name not in fixed, True)
        for name, value in by_name
    )


class _TorchLaunches(TorchDispatchMode):
    def __init__(self, launches: list[Launch]) -> None:
        super().__init__()
        self._launches = launches

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name().removeprefix("aten::")
        if not func.is_view and "empty" not in name:
            self._launches.append(Launch(name))
        return func(*args, **(kwargs or {}))


def num_variants(launches: list[Launch]) -> dict[str, int]:
    """Return the number of variants of each Triton kernel."""
    return dict(Counter(launch.kernel for launch in set(launches) if launch.variant))
