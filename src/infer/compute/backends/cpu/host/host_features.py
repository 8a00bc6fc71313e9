"""The processor as LLVM knows it, and the features that Numba compiles for. Numba is loaded only if it has settings.

LLVM reports little about an ARM CPU on Linux and nothing on macOS, so the system is asked.
"""

import ctypes
import platform
import sys
from importlib import import_module

import llvmlite.binding as llvm

from infer.compute.backends.cpu.host.kernel_cache import has_numba_settings
from infer.system.macos import sysctl

# LLVM's name of a feature: its bit in getauxval(AT_HWCAP) or (AT_HWCAP2) on Linux, its name in sysctl on macOS.
_HWCAP, _HWCAP2 = 16, 26
_ARM_FEATURES = {
    "neon": (_HWCAP, 1, "AdvSIMD"),
    "fullfp16": (_HWCAP, 10, "FEAT_FP16"),
    "dotprod": (_HWCAP, 20, "FEAT_DotProd"),
    "i8mm": (_HWCAP2, 13, "FEAT_I8MM"),
    "bf16": (_HWCAP2, 14, "FEAT_BF16"),
}


def arm_features() -> frozenset[str]:
    """Return the features of this ARM CPU; none on another architecture."""
    if platform.machine().lower() not in ("aarch64", "arm64"):
        return frozenset()
    if sys.platform == "darwin":
        known = (name for name, (*_, key) in _ARM_FEATURES.items() if sysctl(f"hw.optional.arm.{key}"))
        return frozenset(known) | {"neon"}
    if sys.platform != "linux":
        return frozenset({"neon"})
    auxval = ctypes.CDLL(None).getauxval
    auxval.restype, auxval.argtypes = ctypes.c_ulong, [ctypes.c_ulong]
    return frozenset(name for name, (kind, bit, _) in _ARM_FEATURES.items() if auxval(kind) >> bit & 1)


def host() -> str:
    return f"{llvm.get_host_cpu_name()} {llvm.get_host_cpu_features().flatten()}"


def target_features() -> frozenset[str]:
    """Return the features that Numba compiles for."""
    if has_numba_settings():
        config = import_module("numba.core.config")
        if config.CPU_FEATURES is not None:
            return frozenset(name[1:] for name in config.CPU_FEATURES.split(",") if name.startswith("+"))
        if config.CPU_NAME not in (None, "host"):
            return frozenset()
    return arm_features().union(name for name, present in llvm.get_host_cpu_features().items() if present)
