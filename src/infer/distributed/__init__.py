"""Old name of `infer.serving.distributed`, which works for one release. `BatchEngine` is a name of `infer` now."""

import warnings

import infer


def __getattr__(name: str) -> object:
    if name != "BatchEngine":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    warnings.warn("infer.distributed.BatchEngine is now infer.BatchEngine", DeprecationWarning, stacklevel=2)
    return infer.BatchEngine
