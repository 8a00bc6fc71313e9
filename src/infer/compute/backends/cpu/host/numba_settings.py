"""Numba's own settings, which change what it compiles. Loads no Numba."""

import os
from pathlib import Path


def has_numba_settings() -> bool:
    return any(numba_settings())


def numba_settings() -> tuple[list[tuple[str, str]], bytes]:
    """Return Numba's settings in the environment, and those that it reads in the working directory."""
    variables = sorted((name, value) for name, value in os.environ.items() if name.startswith("NUMBA_"))
    try:
        return variables, Path(".numba_config.yaml").read_bytes()
    except OSError:
        return variables, b""
