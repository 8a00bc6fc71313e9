"""Make Triton's interpreter faster: work that it repeats for each operation is done once, with the same results.

Products of matrices are summed in one order. NumPy's BLAS rounds by the shape of the matrices on some CPUs.
"""

import warnings
from collections.abc import Iterator
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
    """Run kernels without NumPy's warnings, because arithmetic with infinities is normal in a kernel.

    So are tokens that are NaN, such as the padding of a recorded step: the largest of their numbers is not used.
    """
    with pytest.MonkeyPatch.context() as patch, np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "All-NaN slice encountered")
        _make_types_once(patch)
        _call_definitions(patch)
        _convert_only_what_differs(patch)
        patch.setattr(interpreter.InterpreterBuilder, "create_dot", _dot)
        # The language is prepared once, not at each launch and call of a device function.
        prepared = interpreter._patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
        patch.setattr(interpreter, "_patch_lang", lambda function: SimpleNamespace(restore=lambda: None))
        # Integers are not computed a second time in 64 bits, for an assertion of `debug`, which is off.
        builder = interpreter.interpreter_builder
        patch.setattr(builder, "options", replace(builder.options, sanitize_overflow=False))
        try:
            yield
        finally:
            prepared.restore()


def _make_types_once(patch: pytest.MonkeyPatch) -> None:
    """Compute each type and shape once. They are values, so equal ones can share their attributes."""
    make, find, types, unwrap = tl.block_type, interpreter._get_np_dtype, dict[Any, Any](), tl.core._unwrap_if_constexpr
    whole, plain = make.__init__, frozenset((tl.tensor, bool, int, float))

    def make_block(self: Any, element: Any, shape: Any) -> None:
        if (key := (element.name, *shape)) not in types:
            whole(self, element, shape)
            types[key] = vars(self)
        self.__dict__ = types[key]

    def numpy_type(type_: Any) -> Any:
        return types.get(type_.scalar.name) or types.setdefault(type_.scalar.name, find(type_))

    def make_tensor(self: Any, handle: Any, type: Any) -> None:
        if "parts" not in vars(type):
            type.parts = type.scalar, *_shape_of(*(type.shape if type.is_block() else ()))
        self.handle, self.type = handle, type
        self.dtype, self.shape, self.numel = type.parts

    patch.setattr(make, "__init__", make_block)
    patch.setattr(interpreter, "_get_np_dtype", numpy_type)
    patch.setattr(tl.tensor, "__init__", make_tensor)
    patch.setattr(tl.core, "_unwrap_if_constexpr", lambda value: value if type(value) in plain else unwrap(value))
    for kind in (tl.dtype, tl.tuple):
        patch.setattr(kind, "__eq__", lambda one, other, equal=kind.__eq__: one is other or equal(one, other))


@cache
def _shape_of(*sizes: int) -> tuple[Any, Any]:
    return tl.tuple([tl.constexpr(size) for size in sizes]), tl.constexpr(int(np.prod(sizes)))


def _call_definitions(patch: pytest.MonkeyPatch) -> None:
    """Call the language's functions without the wrapper that demands their semantics."""

    def call_definition(owner: Any, name: str, member: Any, _builder: Any, scope: Any) -> None:
        definition, semantic = getattr(member, "__wrapped__", member), interpreter.interpreter_semantic

        def call(*args: Any, **kwargs: Any) -> Any:
            kwargs["_semantic"] = semantic
            return definition(*args, **kwargs)

        scope.set_attr(owner, name, call)

    patch.setattr(interpreter, "_patch_attr", call_definition)


def _convert_only_what_differs(patch: pytest.MonkeyPatch) -> None:
    """Leave operands as they are if their types are equal. Convert a number once for all tensors of a type."""
    semantic, numbers = interpreter.interpreter_semantic, dict[Any, Any]()
    broadcast, convert = semantic.broadcast_impl_value, semantic.binary_op_type_checking_impl

    def convert_to_one(one: Any, other: Any, *flags: Any, **named: Any) -> Any:
        is_first, is_second = type(one) is tl.tensor, type(other) is tl.tensor
        if is_first is is_second:
            is_equal = is_first and one.dtype is other.dtype and one.shape is other.shape and not one.dtype.is_ptr()
            return (one, other) if is_equal and len(flags) < 3 and not named else convert(one, other, *flags, **named)
        key = (one.type.name, repr(other), flags) if is_first else (repr(one), other.type.name, flags)
        if named or key not in numbers:
            pair = convert(one, other, *flags, **named)
            if named or pair[is_second] is not (one if is_first else other):
                return pair
            numbers[key] = pair[is_first]
        return (one, numbers[key]) if is_first else (numbers[key], other)

    patch.setattr(semantic, "binary_op_type_checking_impl", convert_to_one)
    patch.setattr(semantic, "broadcast_impl_value", lambda *of: of if of[0].shape is of[1].shape else broadcast(*of))


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
