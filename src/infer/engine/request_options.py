"""What may be asked of one request besides its prompt and how it is sampled; every value is checked when it is made."""

import threading
from dataclasses import dataclass
from typing import final, get_args, no_type_check

from infer.engine.model_settings import Overflow, Speculation
from infer.errors import InvalidRequestError
from infer.runner.context import PREFILL_CHUNK
from infer.speculation.ngram import MAX_DRAFT_TOKENS, NUM_DRAFT_TOKENS


# Its own checks name the rule: those of the tests' hook come too early.
@no_type_check
@final
@dataclass(frozen=True, kw_only=True)
class RequestOptions:
    """`cancel` ends the answer from another thread, and so does closing the model."""

    cancel: threading.Event | None = None
    speculation: Speculation | None = None
    num_draft_tokens: int = NUM_DRAFT_TOKENS
    prefill_chunk: int = PREFILL_CHUNK  # tokens of a prompt in one step
    overflow: Overflow = "error"  # what happens to a prompt that is too long

    def __post_init__(self) -> None:
        if self.cancel is not None and not isinstance(self.cancel, threading.Event):
            raise InvalidRequestError(f"cancel must be a threading.Event or None, got {self.cancel!r:.80}")
        if self.speculation is not None:
            check_choice("speculation", self.speculation, get_args(Speculation), " or None")
        check_count("num_draft_tokens", self.num_draft_tokens, 1, MAX_DRAFT_TOKENS)
        check_count("prefill_chunk", self.prefill_chunk, 1, PREFILL_CHUNK)
        check_choice("overflow", self.overflow, get_args(Overflow))


def check_choice(name: str, value: object, choices: tuple[str, ...], others: str = "") -> None:
    """Raises InvalidRequestError."""
    if not isinstance(value, str) or value not in choices:
        raise InvalidRequestError(f"{name} must be {' or '.join(map(repr, choices))}{others}, got {value!r:.80}")


def check_count(name: str, value: object, least: int, most: int) -> None:
    """Raises InvalidRequestError."""
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise InvalidRequestError(f"{name} must be a whole number in [{least}, {most}], got {value!r:.80}")


def check_callback(name: str, value: object) -> None:
    """Raises InvalidRequestError."""
    if value is not None and not callable(value):
        raise InvalidRequestError(f"{name} must be a function or None, got {value!r:.80}")
