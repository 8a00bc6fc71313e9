"""Tables of cases of a test."""

from typing import Any

import pytest


def cases(names: str, *rows: Any) -> pytest.MarkDecorator:
    """Run a test with the values of each row; names of several values are separated by spaces."""
    return pytest.mark.parametrize(found if len(found := tuple(names.split())) > 1 else names, rows)
