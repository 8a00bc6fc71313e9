"""Several processes that serve one model: which of them a request goes to, and what becomes of it when one dies."""

from importlib import import_module


def __getattr__(name: str) -> object:
    """`BatchEngine` is loaded on its first use: it loads torch."""
    if name != "BatchEngine":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return import_module("infer.distributed.batch").BatchEngine
