"""A record as a kernel sees it: its fields by name, and by index the arrays that they point to.

    args.num_rows         a field, which may be set
    args.seed[row]        an element of the array that a field points to, if `records.pointer` gives its type
    args.values + n       a pointer to the array from element n on

Indices are not checked.
"""

import operator
from hashlib import sha256
from typing import Any, NamedTuple, final

import numpy as np
from llvmlite.ir import IRBuilder as Builder
from numba import types
from numba.core.imputils import lower_getattr_generic, lower_setattr_generic
from numba.core.typing.templates import AttributeTemplate, infer_getattr
from numba.extending import intrinsic, models, register_model
from numba.np.numpy_support import from_dtype

from infer.compute.backends.cpu.simd import I8, I64, Value, constant, multiply, operation


class RecordField(NamedTuple):
    offset: int
    type: types.Type
    is_array: bool  # that lies in the record


@final
class RecordAt(types.Type):  # type: ignore[misc]
    """The address of a record, or of the first of several."""

    def __init__(self, record: np.dtype) -> None:
        self.num_bytes = record.itemsize
        self.fields = {name: _field(record[name], offset) for name, offset in _offsets(record)}
        super().__init__(name=f"record_{sha256(repr((self.num_bytes, self.fields)).encode()).hexdigest()[:16]}")


def _offsets(record: np.dtype) -> list[tuple[str, int]]:
    assert record.fields is not None
    return [(name, int(field[1])) for name, field in record.fields.items()]


def _field(type_: np.dtype, offset: int) -> RecordField:
    if type_.subdtype is not None:
        return RecordField(offset, _pointer(type_.base), True)
    element = None if type_.metadata is None else type_.metadata["element"]
    return RecordField(offset, from_dtype(type_) if element is None else _pointer(element), False)


def _pointer(element: np.dtype) -> types.Type:
    return types.CPointer(from_dtype(element)) if element.names is None else RecordAt(element)


@register_model(RecordAt)
class _RecordModel(models.PrimitiveModel):  # type: ignore[misc]
    def __init__(self, manager: Any, record: RecordAt) -> None:
        super().__init__(manager, record, I8.as_pointer())


@infer_getattr
class _Attributes(AttributeTemplate):  # type: ignore[misc]
    key = RecordAt

    def generic_resolve(self, record: RecordAt, name: str) -> types.Type | None:
        field = record.fields.get(name)
        return None if field is None else field.type


def _place(b: Builder, context: Any, record: Value, field: RecordField) -> Value:
    kind = field.type if field.is_array else types.CPointer(field.type)
    return b.bitcast(b.gep(record, [constant(I64, field.offset)]), context.get_value_type(kind))


@lower_getattr_generic(RecordAt)
def _get(context: Any, b: Builder, record: RecordAt, value: Value, name: str) -> Value:
    field = record.fields[name]
    place = _place(b, context, value, field)
    return place if field.is_array else context.unpack_value(b, field.type, place)


@lower_setattr_generic(RecordAt)
def _set(context: Any, b: Builder, signature: Any, arguments: Any, name: str) -> None:
    field = signature.args[0].fields[name]
    context.pack_value(b, field.type, arguments[1], _place(b, context, arguments[0], field))


@intrinsic
def nth_record(context: Any, first: Any, index: Any) -> Any:
    def emit(context: Any, b: Builder, signature: Any, arguments: Any) -> Value:
        return b.gep(arguments[0], [multiply(b, arguments[1], first.num_bytes)])

    return first(first, types.int64), emit


for _element in (types.float32, types.float64, types.int32, types.int64):
    _kind = types.CPointer(_element)
    operation(_kind, _kind, types.int64, key=operator.add)(lambda b, pointer, count: b.gep(pointer, [count]))
