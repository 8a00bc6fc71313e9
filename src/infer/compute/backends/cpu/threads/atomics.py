"""Control of threads: calls through an address, atomic numbers in memory, waiting, clocks.

A semaphore is the system's: POSIX's sem_t, on macOS a pointer to one of libdispatch's. `pool` makes them. A thread that
waits for a number in memory sleeps in Linux's futex, or in `os_sync_wait_on_address` of macOS 14.4. On other systems it
yields its core again and again.
"""

import ctypes
import platform
import sys

from llvmlite import ir
from llvmlite.ir import IRBuilder as Builder
from numba import types
from numba.core import cgutils

from infer.compute.backends.cpu.simd import I8, I32, I64, Value, address, call, operation

_POINTER = I8.as_pointer()
_IS_MACOS = sys.platform == "darwin"
_CLOCK = 8 if _IS_MACOS else 1  # CLOCK_UPTIME_RAW, CLOCK_MONOTONIC: the one that `time.perf_counter` reads
_FOR_EVER = -1
_TURN_NANOSECONDS = 50_000_000  # how long macOS waits at once, where no signal ends a wait
_MOMENT_MICROSECONDS = 20
_FUTEX = {"x86_64": 202, "aarch64": 98}.get(platform.machine()) if sys.platform == "linux" else None  # its call number
_FUTEX_WAIT, _FUTEX_WAKE = 128, 129  # of this process alone
_ALL = 2**31 - 1
_WAITS_ON_ADDRESSES = getattr(ctypes.CDLL(None), "os_sync_wait_on_address", None) is not None  # macOS 14.4 or newer
words = types.CPointer(types.int64)
_COMMAND = ir.FunctionType(ir.VoidType(), [_POINTER, _POINTER, I64, I64])


@operation(types.void, address, address, address, types.int64, types.int64)
def call_command(b: Builder, function: Value, arguments: Value, state: Value, third: Value, fourth: Value) -> None:
    """Call a compiled command. For an epilogue, `third` and `fourth` are a buffer and a row, not a thread."""
    pointers = [b.inttoptr(where, _POINTER) for where in (arguments, state)]
    b.call(b.inttoptr(function, _COMMAND.as_pointer()), [*pointers, third, fourth])


@operation(types.void, address, types.int64)
def call_python(b: Builder, function: Value, number: Value) -> None:
    """Call a `ctypes` callback that takes a number. The callback acquires the interpreter's lock itself."""
    kind = ir.FunctionType(ir.VoidType(), [I64])
    b.call(b.inttoptr(function, kind.as_pointer()), [number])


@operation(types.int64, words, types.int64)
def atomic_add(b: Builder, where: Value, amount: Value) -> Value:
    """Add to the i64 at `where` atomically, and return its value before."""
    return b.atomic_rmw("add", where, amount, "seq_cst")


@operation(types.int64, words, types.int64)
def atomic_exchange(b: Builder, where: Value, x: Value) -> Value:
    """Store x in the i64 at `where` atomically, and return its value before."""
    return b.atomic_rmw("xchg", where, x, "seq_cst")


@operation(types.int64, words, types.int64, types.int64)
def compare_exchange(b: Builder, where: Value, expected: Value, x: Value) -> Value:
    """Store x in the i64 at `where` if its value is `expected`, atomically. Return the value before."""
    pair = b.cmpxchg(where, expected, x, "seq_cst", "seq_cst")
    return b.extract_value(pair, 0)


@operation(types.int64, words)
def atomic_load(b: Builder, where: Value) -> Value:
    return b.load_atomic(where, "seq_cst", 8, typ=I64)


@operation(types.void, words, types.int64)
def atomic_store(b: Builder, where: Value, x: Value) -> None:
    b.store_atomic(x, where, "seq_cst", 8)


@operation(types.void)
def pause(b: Builder) -> None:
    """Tell the core that this is a spin loop."""
    machine = platform.machine().lower()
    if machine in ("x86_64", "amd64", "i686"):
        call(b, "x86.sse2.pause", ir.VoidType())
    elif machine in ("aarch64", "arm64"):  # `yield` is nothing there, and isb takes about as long as x86's pause
        call(b, "aarch64.isb", ir.VoidType(), I32(15))


@operation(types.void, words, types.int64)
def sleep_while(b: Builder, where: Value, x: Value) -> None:
    """Sleep until `wake_all` while the number is x. May also return immediately, or when a signal arrives."""
    if _WAITS_ON_ADDRESSES:
        call_system(b, "os_sync_wait_on_address", I32, b.bitcast(where, _POINTER), x, I64(8), I32(0))
    elif _FUTEX is None:
        yield_thread(b)
    else:
        _futex(b, where, _FUTEX_WAIT, b.trunc(x, I32))  # of a number that grows the lower half tells


@operation(types.void, words)
def wake_all(b: Builder, where: Value) -> None:
    """Wake the threads that sleep on the number at this address."""
    if _WAITS_ON_ADDRESSES:
        call_system(b, "os_sync_wake_by_address_all", I32, b.bitcast(where, _POINTER), I64(8), I32(0))
    elif _FUTEX is not None:
        _futex(b, where, _FUTEX_WAKE, I32(_ALL))


def _futex(b: Builder, where: Value, what: int, value: Value) -> None:
    kind = ir.FunctionType(I64, [I64], var_arg=True)
    call = cgutils.get_or_insert_function(b.module, kind, "syscall")
    b.call(call, [I64(_FUTEX), b.ptrtoint(where, I64), I64(what), b.zext(value, I64), I64(0)])


@operation(types.void)
def sleep_briefly(b: Builder) -> None:
    """Yield the core to another process for a moment: for a thread that waits for that process."""
    call_system(b, "usleep", I32, I32(_MOMENT_MICROSECONDS))


@operation(types.void)
def yield_thread(b: Builder) -> None:
    if sys.platform != "win32":
        call_system(b, "sched_yield", I32)


@operation(types.void, words)
def post_semaphore(b: Builder, semaphore: Value) -> None:
    if _IS_MACOS:
        call_system(b, "dispatch_semaphore_signal", I64, _dispatched(b, semaphore))
    else:
        call_system(b, "sem_post", I32, b.bitcast(semaphore, _POINTER))


@operation(types.int64, words)
def wait_semaphore(b: Builder, semaphore: Value) -> Value:
    """Sleep until the semaphore is posted. Return nonzero if a signal arrived instead."""
    if _IS_MACOS:
        return call_system(b, "dispatch_semaphore_wait", I64, _dispatched(b, semaphore), I64(_FOR_EVER))
    return b.sext(call_system(b, "sem_wait", I32, b.bitcast(semaphore, _POINTER)), I64)


@operation(types.int64, words)
def wait_semaphore_briefly(b: Builder, semaphore: Value) -> Value:
    """Wait like `wait_semaphore`, but never long if signals do not end it. Return nonzero if it was not posted."""
    if _IS_MACOS:
        until = call_system(b, "dispatch_time", I64, I64(0), I64(_TURN_NANOSECONDS))
        return call_system(b, "dispatch_semaphore_wait", I64, _dispatched(b, semaphore), until)
    return b.sext(call_system(b, "sem_wait", I32, b.bitcast(semaphore, _POINTER)), I64)


@operation(types.int64)
def thread_id(b: Builder) -> Value:
    """Return the number of this thread, as `threading.get_ident` does."""
    return call_system(b, "pthread_self", I64)


@operation(types.int64)
def nanoseconds(b: Builder) -> Value:
    """Return the time of the clock that `time.perf_counter_ns` reads."""
    now = cgutils.alloca_once(b, ir.ArrayType(I64, 2))  # struct timespec
    call_system(b, "clock_gettime", I32, I32(_CLOCK), b.bitcast(now, _POINTER))
    seconds, rest = (b.load(b.gep(now, [I32(0), I32(index)])) for index in (0, 1))
    return b.add(b.mul(seconds, I64(10**9)), rest)


@operation(types.int64)
def cycles(b: Builder) -> Value:
    return call(b, "readcyclecounter", I64)


def call_system(b: Builder, name: str, result: ir.Type, *arguments: Value) -> Value:
    """Call a function of the C library."""
    kind = ir.FunctionType(result, [argument.type for argument in arguments])
    return b.call(cgutils.get_or_insert_function(b.module, kind, name), arguments)


def _dispatched(b: Builder, semaphore: Value) -> Value:
    return b.inttoptr(b.load(semaphore, typ=I64), _POINTER)
