"""The types of weights, and of keys and values, that OpenCL's kernels read. Loads no torch and no OpenCL.

Weights of all other types become F16. This module is OpenCL's `before_load.MemoryRules`: the packed weights and the
buffers are those of the CPU.
"""

from infer.compute.backends.cpu import workspace
from infer.errors import InvalidRequestError

TYPES = frozenset({"F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K"})
TYPES |= {"IQ4_NL", "IQ4_XS"}
KV_TYPES = ("f32", "f16", "q4")
IS_TAKEN_AT_ONCE = False


def stored_type(type: str) -> str:
    """Return the type in which OpenCL stores a matrix of this type."""
    return type if type in TYPES else "F16"


def check_kv_type(kv_type: str) -> None:
    """Raise InvalidRequestError if the kernels do not read keys and values of this type. "auto" is f16."""
    if kv_type not in (*KV_TYPES, "auto"):
        raise InvalidRequestError(
            f"kv_type must be one of {', '.join(KV_TYPES)} on device opencl, got {kv_type}: use one of these, or "
            "--device cpu"
        )


def matrix_bytes(type: str, rows: int, columns: int) -> int:
    return workspace.matrix_bytes(stored_type(type), rows, columns)


table_bytes = matrix_bytes
workspace_bytes = workspace.workspace_bytes
