"""Make Triton's interpreter faster: work that it repeats for each operation is done once, with the same results.

Products of matrices are summed in one order. NumPy's BLAS rounds by the shape of the matrices on some CPUs.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import triton.language as tl
from triton.runtime import interpreter


@contextmanager
def quick_interpreter() -> Iterator[None]:
    """Run kernels without NumPy's warnings, because arithmetic with infinities is normal in a kernel."""
    with pytest.MonkeyPatch.context() as patch, np.errstate(all="ignore"):
        _prepare_once_a_launch(patch)
        _leave_out_sums_of_no_use(patch)
        _make_types_once(patch)
        patch.setattr(interpreter.InterpreterBuilder, "create_dot", _dot)
        yield


def _prepare_once_a_launch(patch: pytest.MonkeyPatch) -> None:
    """Prepare the language for kernels and its own functions once, not at each call of a device function."""
    prepare, is_prepared = interpreter._patch_lang, [False]
    whole_language = SimpleNamespace(__globals__={"tl": tl, "core": tl.core})

    def prepare_once(function: Any) -> Any:
        if is_prepared[0]:
            return None
        scope = prepare(whole_language)
        restore, is_prepared[0] = scope.restore, True

        def restore_all() -> None:
            is_prepared[0] = False
            restore()

        scope.restore = restore_all
        return scope

    patch.setattr(interpreter, "_patch_lang", prepare_once)


def _leave_out_sums_of_no_use(patch: pytest.MonkeyPatch) -> None:
    """Leave out the second computation of integers in 64 bits, for an assertion of `debug`, which is off."""
    builder = interpreter.interpreter_builder
    patch.setattr(builder, "options", replace(builder.options, sanitize_overflow=False))


def _make_types_once(patch: pytest.MonkeyPatch) -> None:
    """Make each type and shape once. They are values, so equal ones can be the same object."""
    make, find, types = tl.block_type, interpreter._get_np_dtype, dict[Any, Any]()

    def block_type(element: Any, shape: Any) -> Any:
        key = (element.name, *shape)
        if key not in types:
            types[key] = make(element, shape)
        return types[key]

    def numpy_type(type_: Any) -> Any:
        name = type_.scalar.name
        if name not in types:
            types[name] = find(type_)
        return types[name]

    @cache
    def shape_of(*sizes: int) -> tuple[Any, Any]:
        return tl.tuple([tl.constexpr(size) for size in sizes]), tl.constexpr(int(np.prod(sizes)))

    def make_tensor(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = shape_of(*(type.shape if type.is_block() else ()))

    patch.setattr(make, "with_element_ty", lambda self, element: block_type(element, self.shape))
    patch.setattr(interpreter.InterpreterBuilder, "get_block_ty", lambda self, *of: block_type(*of))
    patch.setattr(interpreter, "_get_np_dtype", numpy_type)
    patch.setattr(tl.tensor, "__init__", make_tensor)
    for kind in (tl.dtype, tl.tuple):
        patch.setattr(kind, "__eq__", _same_or(kind.__eq__))


def _dot(_builder: Any, a: Any, b: Any, addend: Any, _precision: Any, _imprecise: Any) -> Any:
    """Return a @ b + addend as `tl.dot` does; `multiply_in_one_order` gives the product."""
    product = multiply_in_one_order(_numbers(a), _numbers(b), addend.data.dtype)
    return interpreter.TensorHandle(product + addend.data, addend.dtype.scalar)


def _numbers(tensor: Any) -> np.ndarray[Any, Any]:
    """Return a tensor's numbers. The interpreter stores bfloat16 as integers of the same bits."""
    if tensor.dtype.scalar.name != "bf16":
        return tensor.data
    return (tensor.data.view(np.uint16).astype(np.uint32) << 16).view(np.float32)


def multiply_in_one_order(
    a: np.ndarray[Any, Any], b: np.ndarray[Any, Any], dtype: np.dtype[Any]
) -> np.ndarray[Any, Any]:
    """Return a @ b. The terms of a sum are added in an order that depends only on their number.

    All operations are elementwise, so the bits of a row do not depend on other rows, columns or the CPU. The number of
    terms is a power of two, as `tl.dot` demands.
    """
    terms = a.astype(dtype)[..., :, :, None] * b.astype(dtype)[..., None, :, :]
    while (count := terms.shape[-2]) > 1:
        terms = terms[..., : count // 2, :] + terms[..., count // 2 :, :]
    return terms[..., 0, :]


def _same_or(equal: Callable[[Any, Any], bool]) -> Callable[[Any, Any], bool]:
    return lambda one, other: one is other or equal(one, other)
