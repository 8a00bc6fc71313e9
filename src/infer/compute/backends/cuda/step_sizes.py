"""The sizes of recorded steps: few, although a step has up to thousands of tokens and hundreds of lines of logits.

The number of tokens is a power of 2. A step of decoding has as many lines of logits as tokens. A step with prompts has
fewer lines, in a few sizes only. Padding costs little: it is embedded as NaN, for which products read no weight.
"""

from collections.abc import Iterator
from typing import NamedTuple

from infer.compute.operands.limits import StepLimits

_LINES = 8, 64  # of a step with prompts; or the most lines
_TOKENS_AHEAD = 1, 8, 16, 64  # of steps of decoding: other sizes are compiled alike
_PROMPT_AHEAD = 512


class StepSize(NamedTuple):
    """Numbers of tokens and of lines of logits that a recording has room for."""

    tokens: int
    logits: int


def size_for(num_tokens: int, num_logits: int, limits: StepLimits) -> StepSize:
    """Return the size of the recording for a step within the limits. Without logits the head reads no weight."""
    tokens = _power_of_2(num_tokens, limits.tokens)
    if not num_logits:
        return StepSize(tokens, 0)
    sizes = sorted(min(each, limits.logits) for each in (*_LINES, tokens, limits.logits))
    return StepSize(tokens, next(each for each in sizes if each >= num_logits))


def sizes_ahead(limits: StepLimits) -> Iterator[StepSize]:
    """Yield sizes whose recordings compile every kernel that other sizes need."""
    for count in _TOKENS_AHEAD:
        if count <= min(limits):
            yield StepSize(count, count)
    for num_tokens in sorted({min(_PROMPT_AHEAD, limits.tokens), limits.tokens}):
        yield size_for(num_tokens, 1, limits)


def _power_of_2(count: int, most: int) -> int:
    """Return the next power of 2, but at most `most`. Nothing stays 0."""
    return min(most, 1 << (count - 1).bit_length()) if count else 0
