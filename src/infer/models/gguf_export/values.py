"""Values of GGUF's metadata, with the types that llama.cpp's converter gives them."""

import numpy as np

from infer.files.gguf.gguf import TypedValue

Value = bool | int | float | str | bytes | list[bool] | list[int] | list[float] | list[str]


def typed(value: Value) -> TypedValue:
    """Return a value with its type. Counts are unsigned, and integers in lists are signed, as in llama.cpp's files."""
    if isinstance(value, list):
        kind = typed(value[0]).type if value else "i32"
        return TypedValue("i32" if kind == "u32" else kind, value)
    if isinstance(value, bytes):
        return TypedValue("u8", list(value))
    if isinstance(value, bool):
        return TypedValue("bool", value)
    if isinstance(value, int):
        return TypedValue("u32", value)
    return TypedValue("f32", float(np.float32(value))) if isinstance(value, float) else TypedValue("string", value)
