"""Kernels in LLVM's text: addresses are integers to the end, and functions are linked before code is made of them."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numba import njit

from infer.compute.backends.cpu.compile import compiler
from infer.compute.backends.cpu.simd import load_i64, store_i64

COPY = np.dtype([("to", np.int64), ("source", np.int64), ("stride", np.int64), ("count", np.int64)])


@njit
def copy_some(to, source, stride, count):  # type: ignore[no-untyped-def]
    """Run a loop whose addresses code generation moves to their uses. LLVM calls them `sunkaddr`."""
    for i in range(count):
        if load_i64(source + stride * i) != 7:
            store_i64(to + stride * i + 8, load_i64(source + stride * i + 16))


def make_copy() -> Callable[..., None]:
    def copy(args, state, thread, num_threads):  # type: ignore[no-untyped-def]
        copy_some(args.to, args.source, args.stride, args.count)

    return copy


@pytest.fixture(scope="module")
def modules() -> dict[str, str]:
    """Return the text of each module that was linked into the command `copy`, by name, and of the command."""
    linked: dict[str, str] = {}
    take = compiler._Library._get_module_for_linking

    def note(library: Any) -> Any:
        module = take(library)
        linked.setdefault(library.name, str(module))
        return module

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiler._Library, "_get_module_for_linking", note)
        compiler.compile_command("copy", make_copy, COPY)
    linked["copy"] = str(compiler._kept[-1]._library._final_module)
    return linked


def test_no_address_is_split_into_a_pointer_and_an_offset_by_guess(modules: dict[str, str]) -> None:
    moved = [line for line in modules["copy"].splitlines() if "sunkaddr" in line.partition("=")[0]]
    assert moved
    assert not [line for line in moved if "getelementptr" in line]


def test_functions_are_linked_before_code_is_made_of_them(modules: dict[str, str]) -> None:
    assert "copy_some" in modules
    assert not [name for name, text in modules.items() if name != "copy" and "sunkaddr" in text]
