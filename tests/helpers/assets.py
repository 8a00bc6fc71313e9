"""Files that `make assets` fetches, or a skip with the reason why one is missing."""

import os
from pathlib import Path

import pytest

CARRIER = "carrier: "  # conftest.py allows a skip with this beginning: a package with a model cannot be fetched


def asset(relative: str) -> Path:
    """Return a file or folder of the assets. A script that cannot fetch it writes the reason beside its place."""
    assets = Path(os.environ.get("INFER_TEST_ASSETS") or Path.home() / ".cache" / "infer-tests")
    path, reason = assets / relative, assets / f"{relative}.missing"
    if path.exists():
        return path
    if reason.exists():
        pytest.skip(CARRIER + reason.read_text(encoding="utf-8"))
    pytest.skip(f"{path} is missing: INFER_TESTS=all make assets")
