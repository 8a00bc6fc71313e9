"""Refusals of bad models and requests: one line each."""

from collections.abc import Callable

import pytest

from infer.errors import InferError


def refusal(call: Callable[[], object], kind: type[InferError] = InferError) -> str:
    """Return the message of the error that a call raises. It is one line of bounded length."""
    with pytest.raises(kind) as caught:
        call()
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 2000
    return message
