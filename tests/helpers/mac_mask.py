"""A Mac as far as infer's own modules can see, on Linux. `install` masks the modules that are imported after it.

Names that only Linux has are absent, `sys.platform` is "darwin", and no file is in /proc or /sys. Other packages see
Linux. The C library is Linux's, so the two modules that compile or make its semaphores are left as they are.
"""

import builtins
import ctypes
import io
import os
import re
import sys
from collections.abc import Mapping, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

NUMBERS = {"hw.memsize": 16 << 30, "hw.perflevel0.physicalcpu": 2, "hw.physicalcpu": 4}
TEXTS = {"machdep.cpu.brand_string": "Apple M4"}
FREE_BYTES = 4 << 30
_MACOS = "infer.system.macos"
_OF_LINUX_S_LIBRARY = frozenset(f"infer.compute.backends.cpu.threads.{name}" for name in ("atomics", "pool"))
_HIDDEN = ("/proc/", "/sys/")
_ABSENT = {  # names of Python on Linux that it does not have on macOS
    "os": r"sched_(?!yield|get_priority).*|pipe2|memfd_create|MFD_.*|eventfd.*|EFD.*|fdatasync|posix_fa.*|POSIX_FADV_.*"
    r"|getrandom|GRND_.*|copy_file_range|splice|SPLICE_.*|setns|unshare|CLONE_.*|[gs]etres[ug]id|P_PIDFD|pidfd_open"
    r"|O_(TMPFILE|DIRECT|PATH|NOATIME|LARGEFILE|RSYNC)|.*xattr|XATTR_.*|RTLD_DEEPBIND|RWF_.*",
    "signal": r"sigtimedwait|sigwaitinfo|pidfd_send_signal|SIG(RTMIN|RTMAX|POLL|PWR|STKFLT|CLD)",
    "resource": r"prlimit|RLIMIT_(MSGQUEUE|NICE|RTPRIO|RTTIME|SIGPENDING|OFILE)|RUSAGE_THREAD",
    "select": r"epoll|EPOLL.*",
    "socket": r"SOCK_(CLOEXEC|NONBLOCK)|SO_(BINDTODEVICE|PEERCRED|PEERSEC|MARK)|AF_(ALG|VSOCK|NETLINK|PACKET)"
    r"|MSG_CMSG_CLOEXEC|TCP_(QUICKACK|USER_TIMEOUT|CORK|KEEPIDLE|DEFER_ACCEPT|SYNCNT|LINGER2|INFO)",
    "mmap": r"MADV_(HUGEPAGE|NOHUGEPAGE|REMOVE|DO.*|DONTDUMP|DONTFORK|HWPOISON|.*MERGEABLE)"
    r"|MAP_(POPULATE|STACK|DENYWRITE)",
    "fcntl": r"F_(OFD_.*|[GS]ETPIPE_SZ|(ADD|GET)_SEALS|SEAL_.*|[GS]ETLEASE|[GS]ETSIG|NOTIFY)|DN_.*|LOCK_(MAND|R.*|W.*)",
    "time": r"CLOCK_(BOOTTIME|TAI|HIGHRES)|pthread_getcpuclockid",
    "sys": r"\b\B",
}
_open, _open_io, _import = builtins.open, io.open, builtins.__import__


class MacLibrary:
    """The functions of a Mac's C library that `infer.system.macos` calls."""

    def sysctlbyname(self, name: bytes, value: Any, size: Any, *_: object) -> int:
        text, number = TEXTS.get(name.decode()), NUMBERS.get(name.decode())
        if text is not None:
            value.value = text.encode()
        elif number is not None:
            size._obj.value = 8 if name == b"hw.memsize" else 4
            ctypes.memmove(value, number.to_bytes(size._obj.value, "little"), size._obj.value)
        return -1 if text is None and number is None else 0

    def proc_pid_rusage(self, process: int, flavor: int, usage: Any) -> int:
        with _open(f"/proc/{process}/statm") as file:
            usage._obj[9] = int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE")
        return flavor


class _Masked(ModuleType):
    """A module without some of its names. Values are set in the real one."""

    def __init__(self, real: ModuleType) -> None:
        self.__dict__.update(_real=real, _absent=re.compile(_ABSENT[real.__name__]))
        for name in ("__doc__", "__loader__", "__spec__", "__package__"):
            self.__dict__.pop(name, None)

    def __getattr__(self, name: str) -> Any:
        if self._absent.fullmatch(name):
            raise AttributeError(f"macOS has no {self._real.__name__}.{name}", name=name, obj=self)
        if name == "platform" and self._real is sys:
            return "darwin"
        return getattr(self._real, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._real, name, value)


def _import_masked(
    name: str,
    globals: Mapping[str, Any] | None = None,
    locals: Mapping[str, Any] | None = None,
    fromlist: Sequence[str] | None = (),
    level: int = 0,
) -> ModuleType:
    module = _import(name, globals, locals, fromlist or (), level)
    return _Masked(module) if level == 0 and module.__name__ in _ABSENT else module


def _check_visible(file: Any) -> None:
    if isinstance(file, str | Path) and str(file).startswith(_HIDDEN):
        raise FileNotFoundError(2, "macOS has no such file", str(file))


def _open_masked(file: Any, *arguments: Any, **named: Any) -> Any:
    _check_visible(file)
    return _open(file, *arguments, **named)


def _open_for_pathlib(file: Any, *arguments: Any, **named: Any) -> Any:
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals["__name__"] == "pathlib":
        frame = frame.f_back
    if str(frame.f_globals["__name__"]).startswith("infer."):
        _check_visible(file)
    return _open_io(file, *arguments, **named)


class _Loader(SourceFileLoader):
    def exec_module(self, module: ModuleType) -> None:
        if module.__name__ not in _OF_LINUX_S_LIBRARY:
            own = {**vars(builtins), "__import__": _import_masked, "open": _open_masked}
            module.__dict__["__builtins__"] = own
        super().exec_module(module)
        if module.__name__ == _MACOS:
            vars(module).update(_library=MacLibrary, free_memory_bytes=lambda: FREE_BYTES)


class _Finder(MetaPathFinder):
    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name.partition(".")[0] != "infer":
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and isinstance(spec.loader, SourceFileLoader):
            spec.loader = _Loader(name, spec.loader.path)
        return spec


def install() -> None:
    """Mask infer's modules in this process. `pathlib` opens no file of /proc for them."""
    sys.meta_path.insert(0, _Finder())
    io.open = _open_for_pathlib
