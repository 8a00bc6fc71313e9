"""What steers threads rather than computes: calls through an address, atomic numbers in memory, waiting, the clock."""

import platform
import sys

from llvmlite import ir
from llvmlite.ir import IRBuilder as Builder
from numba import types
from numba.core import cgutils

from infer.kernels.cpu.simd import I8, I32, I64, Value, address, operation

_POINTER = I8.as_pointer()
_COMMAND = ir.FunctionType(ir.VoidType(), [_POINTER, _POINTER, I64, I64])


@operation(types.void, address, address, address, types.int64, types.int64)
def call_command(b: Builder, function: Value, arguments: Value, state: Value, third: Value, fourth: Value) -> None:
    """Call a compiled command through its address."""
    pointers = [b.inttoptr(where, _POINTER) for where in (arguments, state)]
    b.call(b.inttoptr(function, _COMMAND.as_pointer()), [*pointers, third, fourth])


@operation(types.void, address, types.int64)
def call_python(b: Builder, function: Value, number: Value) -> None:
    """Call a `ctypes` callback that takes a number; it takes the interpreter's lock for itself."""
    kind = ir.FunctionType(ir.VoidType(), [I64])
    b.call(b.inttoptr(function, kind.as_pointer()), [number])


@operation(types.int64, address, types.int64)
def atomic_add(b: Builder, where: Value, amount: Value) -> Value:
    """The value before."""
    return b.atomic_rmw("add", b.inttoptr(where, I64.as_pointer()), amount, "seq_cst")


@operation(types.int64, address, types.int64)
def atomic_exchange(b: Builder, where: Value, x: Value) -> Value:
    """Store x; the value before."""
    return b.atomic_rmw("xchg", b.inttoptr(where, I64.as_pointer()), x, "seq_cst")


@operation(types.int64, address)
def atomic_load(b: Builder, where: Value) -> Value:
    return b.load_atomic(b.inttoptr(where, I64.as_pointer()), "seq_cst", 8, typ=I64)


@operation(types.void, address, types.int64)
def atomic_store(b: Builder, where: Value, x: Value) -> None:
    b.store_atomic(x, b.inttoptr(where, I64.as_pointer()), "seq_cst", 8)


@operation(types.void)
def pause(b: Builder) -> None:
    """Tell the core that this is a spin loop."""
    if platform.machine().lower() in ("x86_64", "amd64", "i686"):
        pause_type = ir.FunctionType(ir.VoidType(), [])
        b.call(b.module.declare_intrinsic("llvm.x86.sse2.pause", (), pause_type), [])


@operation(types.void)
def yield_thread(b: Builder) -> None:
    if sys.platform != "win32":
        b.call(cgutils.get_or_insert_function(b.module, ir.FunctionType(I32, []), "sched_yield"), [])


@operation(types.int64)
def cycles(b: Builder) -> Value:
    return b.call(b.module.declare_intrinsic("llvm.readcyclecounter", (), ir.FunctionType(I64, [])), [])
