"""Several processes that serve one model: the choice of a process for each request, and failover when one dies."""

from importlib import import_module


def __getattr__(name: str) -> object:
    """Load `BatchEngine` on its first use, because it loads torch."""
    if name != "BatchEngine":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return import_module("infer.serving.distributed.ray_batch").BatchEngine
