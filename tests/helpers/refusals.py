"""Refusals of bad models and requests: one line each."""

import re
from collections.abc import Callable

import pytest

from infer.errors import InferError, InvalidRequestError


def refusal(call: Callable[[], object], kind: type[InferError] = InferError) -> str:
    """Return the message of the error that a call raises. It is one line of bounded length."""
    with pytest.raises(kind) as caught:
        call()
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 2000
    return message


def check_refused(call: Callable[[], object], match: str, kind: type[InferError] = InvalidRequestError) -> None:
    """Check that a call raises an error of a kind, in one line in which the pattern is found."""
    message = refusal(call, kind)
    assert re.search(match, message), message
