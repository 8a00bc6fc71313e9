"""Numba's repeated work for each function, done once, and two of its passes, which no kernel needs, left out.

Numba types each operation on scalars by asking hundreds of templates, and lists the variables of each statement a dozen
times. With these shortcuts, the kernels of a model compile in a quarter less time, and their code is the same.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

from numba.core import base, ir
from numba.core.typed_passes import NopythonRewrites
from numba.core.types.functions import BaseFunction
from numba.core.untyped_passes import InlineClosureLikes

_Patch = tuple[type, str, Callable[..., Any]]

_SIGNATURES: Final[dict[Any, Any]] = {}  # by function and types of its arguments, with the key of what implements it
_SIZES: Final[dict[str, int]] = {}  # bytes, by the name of LLVM's type
_find_signature, _find_size = BaseFunction.get_call_type, base.BaseContext.get_abi_sizeof


@contextmanager
def shortcuts() -> Iterator[None]:
    """Apply the shortcuts while the context runs, under Numba's lock: other functions are compiled without them."""
    usual = [(owner, name, getattr(owner, name)) for owner, name, _ in _PATCHES]
    try:
        _apply(_PATCHES)
        yield
    finally:
        _apply(usual)


def _apply(patches: list[_Patch]) -> None:
    for owner, name, function in patches:
        setattr(owner, name, function)


def _signature(self: Any, context: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
    """Return the signature of a built-in function for these types.

    The implementation of a signature is the one that was found for it last.
    """
    if keywords:
        return _find_signature(self, context, arguments, keywords)
    key = self.key, arguments
    if key not in _SIGNATURES:
        found: Any = _find_signature(self, context, arguments, keywords)
        _SIGNATURES[key] = found, self._impl_keys[found.args]
    signature, self._impl_keys[signature.args] = _SIGNATURES[key]
    return signature


def _size(self: Any, type_: Any) -> int:
    name = str(type_)
    if name not in _SIZES:
        _SIZES[name] = _find_size(self, type_)
    return _SIZES[name]


def _variables(self: Any, value: Any) -> list[Any]:
    found: list[Any] = []
    _add_variables(value, found)
    return found


def _add_variables(value: Any, found: list[Any]) -> None:
    kind = type(value)
    if kind is ir.Var:
        found.append(value)
    elif kind is tuple or kind is list:
        for each in value:
            _add_variables(each, found)
    elif kind is dict:
        for each in value.values():
            _add_variables(each, found)
    elif isinstance(value, ir.Inst):
        found.extend(value.list_vars())


def _changes_nothing(self: Any, state: Any) -> bool:
    return False


_PATCHES: Final[list[_Patch]] = [
    (BaseFunction, "get_call_type", _signature),
    (base.BaseContext, "get_abi_sizeof", _size),
    (ir.Inst, "_rec_list_vars", _variables),
    (InlineClosureLikes, "run_pass", _changes_nothing),  # functions within functions, comprehensions
    (NopythonRewrites, "run_pass", _changes_nothing),  # expressions of whole arrays
]
