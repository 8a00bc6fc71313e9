"""The processor as LLVM knows it, and what Numba compiles for: no Numba where its settings are the usual ones."""

from importlib import import_module

import llvmlite.binding as llvm

from infer.backends.cpu import kernel_cache


def host() -> str:
    return f"{llvm.get_host_cpu_name()} {llvm.get_host_cpu_features().flatten()}"


def target_features() -> frozenset[str]:
    """The features that Numba compiles for."""
    if kernel_cache.has_numba_settings():
        config = import_module("numba.core.config")
        if config.CPU_FEATURES is not None:
            return frozenset(name[1:] for name in config.CPU_FEATURES.split(",") if name.startswith("+"))
        if config.CPU_NAME not in (None, "host"):
            return frozenset()
    return frozenset(name for name, present in llvm.get_host_cpu_features().items() if present)
