"""Constraints by llguidance, the default: an Earley parser over derivatives of patterns, compiled in a millisecond.

The package is loaded when the first grammar is compiled.
"""

import importlib
from collections.abc import Sequence
from time import thread_time
from typing import Any, NoReturn, final

import numpy as np

from infer.errors import ConstraintError
from infer.text.grammar.constraint import Mask
from infer.text.grammar.grammar import Source
from infer.text.grammar.libraries import llguidance_limits
from infer.text.grammar.matcher import GrammarBackend, Matcher
from infer.text.grammar.vocabulary import Vocabulary

SLOW_SECONDS = 0.02  # time of a mask above which it counts
MOST_EXCESS_SECONDS = 0.5  # limit of the time above that, for all masks of a grammar together
_BYTES_PER_SOURCE_BYTE = 80  # memory of a compiled grammar: 25 to 39 MB for 442 KiB
_REFUND = 0.005  # share of SLOW_SECONDS that a quick mask restores


@final
class LlguidanceBackend(GrammarBackend):
    name = "llguidance"

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._library = importlib.import_module("llguidance")
        self._vocabulary = vocabulary
        self._num_ids = len(vocabulary.token_bytes)
        ends = [end for end in vocabulary.end_ids if end < self._num_ids]
        self._tokenizer = self._library.LLTokenizer(
            self._library.TokenizerWrapper(_Spelling(vocabulary, ends[0] if ends else self._num_ids)),
            eos_token=ends or [self._num_ids],
        )

    def compile(self, source: Source) -> "_Compiled":
        limits = llguidance_limits(self._library, source.text)
        return _Compiled(self._library.LLMatcher(self._tokenizer, source.text, log_level=0, limits=limits))

    def num_bytes(self, compiled: "_Compiled", source: Source) -> int:
        return _BYTES_PER_SOURCE_BYTE * len(source.text)

    def make_matcher(self, compiled: "_Compiled") -> Matcher:
        return _LlguidanceMatcher(compiled, self._vocabulary, self._tokenizer.vocab_size)


@final
class _Compiled:
    """A compiled grammar, and the excess time that its masks have taken, over all texts.

    A mask cannot be interrupted. It usually takes a millisecond. A mask of an ambiguous grammar takes longer with each
    token, and all answers of the step wait for it. Only the thread's own time counts, not the wait on a busy machine.
    """

    def __init__(self, matcher: Any) -> None:
        self.matcher = matcher
        self._excess = 0.0

    def get_error(self) -> str:
        return str(self.matcher.get_error())

    def spend(self, seconds: float) -> None:
        """Count the time of a mask. Quick masks restore a part of the budget.

        Raises ConstraintError when the budget is used up.
        """
        if seconds < SLOW_SECONDS:
            self._excess = max(0.0, self._excess - _REFUND * SLOW_SECONDS)
            return
        self._excess += seconds - SLOW_SECONDS
        if self._excess > MOST_EXCESS_SECONDS:
            raise ConstraintError(
                f"the grammar is too ambiguous: its masks take more than {1000 * SLOW_SECONDS:g} ms per token, "
                f"{MOST_EXCESS_SECONDS:g} s in total: allow only one way to write each text"
            )


@final
class _LlguidanceMatcher(Matcher):
    def __init__(self, compiled: _Compiled, vocabulary: Vocabulary, num_ids: int) -> None:
        self._matcher, self._spend = compiled.matcher.deep_copy(), compiled.spend
        self._vocabulary = vocabulary
        self._num_ids = len(vocabulary.token_bytes)
        self._own = np.zeros(-(-num_ids // 32), dtype=np.int32)
        self._num_words, self._num_bytes = len(self._own), self._own.nbytes
        self._rest = vocabulary.vocab_size % 32
        self._mask: Mask | None = None  # the last mask, whose address is known
        self._where = 0

    def fill(self, mask: Mask) -> None:
        started = thread_time()
        self._matcher.unsafe_compute_mask_ptr(self._address(mask), self._num_bytes)
        self._spend(thread_time() - started)
        if self._matcher.is_error():
            self._fail()
        self._complete(mask)

    def _address(self, mask: Mask) -> int:
        """Return the address of the caller's mask if it is large enough, otherwise of the matcher's own."""
        if mask is not self._mask:
            self._mask = mask
            found = mask if len(mask) >= self._num_words else self._own
            self._where = found.ctypes.data
        return self._where

    def _complete(self, mask: Mask) -> None:
        num_words, num_own = len(mask), self._num_words
        if num_words > num_own:
            mask[num_own:] = 0
        elif num_words < num_own:
            mask[:] = self._own[:num_words]
        if self._rest:  # our own end id is after the vocabulary
            mask.view(np.uint32)[self._vocabulary.vocab_size // 32] &= (1 << self._rest) - 1

    def advance(self, token_id: int, mask: Mask, is_last: bool) -> bool:
        """Advance with four library calls instead of six.

        The mask has allowed the token, so it is consumed without a check. A matcher that fails is also stopped, so
        there is no separate check for errors.
        """
        matcher, started = self._matcher, thread_time()
        if not matcher.consume_token(token_id):
            self._fail()
        if matcher.compute_ff_tokens():
            return False
        if not is_last:
            matcher.unsafe_compute_mask_ptr(self._address(mask), self._num_bytes)
            self._spend(thread_time() - started)
            if self._rest or len(mask) != self._num_words:
                self._complete(mask)
        return not matcher.is_stopped()

    def accept(self, token_id: int) -> bool:
        if not 0 <= token_id < self._num_ids:
            return False
        started = thread_time()
        if self._matcher.try_consume_tokens([token_id]) == 1:
            self._spend(thread_time() - started)
            return True
        if self._matcher.is_error():
            self._fail()
        return False

    def _fail(self) -> NoReturn:
        raise ConstraintError(f"the grammar cannot be followed further: {first_line(self._matcher.get_error())}")

    def rollback(self, num_tokens: int) -> None:
        self._matcher.rollback(num_tokens)
        if self._matcher.is_error():
            self._fail()

    def forced(self) -> Sequence[int]:
        ids: list[int] = self._matcher.compute_ff_tokens()
        if not ids:
            return ids
        ends = [i for i, token_id in enumerate(ids) if token_id in self._vocabulary.end_ids]
        return ids[: ends[0]] if ends else ids

    def may_end(self) -> bool:
        return bool(self._matcher.is_accepting())

    def is_stopped(self) -> bool:
        return bool(self._matcher.is_stopped()) and not self._matcher.is_error()


@final
class _Spelling:
    """The tokenizer interface that llguidance calls. It must not raise: an exception here is a panic in the library."""

    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary, eos_token_id: int) -> None:
        self._spell = vocabulary.spell
        self.eos_token_id = eos_token_id
        padding = [b""] * (eos_token_id + 1 - len(vocabulary.token_bytes))
        self.tokens = [*vocabulary.token_bytes, *padding]
        for token_id in vocabulary.control_ids:  # tokens with the same bytes are allowed together
            self.tokens[token_id] = b"[%d]" % token_id
        self.special_token_ids = vocabulary.control_ids

    def __call__(self, text: str | bytes) -> list[int]:
        return self._spell(text.decode(errors="replace") if isinstance(text, bytes) else text)


def first_line(message: str) -> str:
    return message.strip().partition("\n")[0][:300]
