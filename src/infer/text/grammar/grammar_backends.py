"""The grammar libraries: llguidance, the default, and xgrammar, an extra. Each is loaded when it first compiles.

llguidance is an Earley parser over derivatives of patterns, compiled in a millisecond. xgrammar is a pushdown automaton
compiled in advance for the whole vocabulary. It enforces fewer JSON-schema keywords and ignores the others; here they
are refused. Keywords that it handles wrongly are refused, too: with `minLength` or `maxLength` it allows control
characters in strings (0.2.8), and it anchors every `pattern`.
"""

import importlib
from bisect import bisect_right
from collections.abc import Sequence
from functools import cached_property
from itertools import accumulate, takewhile
from time import thread_time
from typing import Any, NoReturn, final

import numpy as np

from infer.errors import ConstraintError
from infer.text.grammar.constraint import Mask, Matcher
from infer.text.grammar.grammar import Source
from infer.text.grammar.libraries import compile_with_xgrammar, llguidance_limits
from infer.text.tokenizer import Tokenizer

_MARK = "\x02"  # put before a text, for tokenizers that add a space at a text's start


@final
class Vocabulary:
    """Vocabulary of a tokenizer and a model whose embedding may have more rows than the tokenizer has ids."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int | None = None) -> None:
        self._tokenizer = tokenizer
        self.vocab_size = tokenizer.vocab_size if vocab_size is None else vocab_size
        known = tokenizer.token_bytes[: self.vocab_size]
        self.end_ids = tuple(sorted(i for i in tokenizer.eos_token_ids if i < self.vocab_size))
        control = tokenizer.special_token_ids | frozenset(self.end_ids)
        self.token_bytes = [b"" if i in control else token for i, token in enumerate(known)]
        self.control_ids = sorted(i for i in control if i < len(known))

    def spell(self, text: str) -> list[int]:
        """Return the tokenizer's own ids for a text in any context. None of the ids is a control token."""
        encoded = text.encode()
        for mark in ("", _MARK):
            ids = self._tokenizer.encode(mark + text, add_special_tokens=False)
            if mark:
                ids = self._without_mark(ids)
            if b"".join(self.token_bytes[i] if i < len(self.token_bytes) else b"" for i in ids) == encoded:
                return ids
        return self.spell_greedily(encoded)

    def spell_greedily(self, text: bytes) -> list[int]:
        """Return ids by taking the longest token first. Stop at a byte that no token has."""
        ids, at = list[int](), 0
        while at < len(text):
            ends = range(min(len(text), at + self._longest), at, -1)
            end = next((end for end in ends if text[at:end] in self._id_by_bytes), None)
            if end is None:
                break
            ids.append(self._id_by_bytes[text[at:end]])
            at = end
        return ids

    def settled(self, text: str) -> list[int]:
        """Return the ids of a text that continues, without the last ids: those that the text after it could change."""
        data, ids = text.encode(), self.spell(text)
        starts = range(max(0, len(data) - self._longest), len(data))
        settled = next((start for start in starts if self._goes_on(data[start:])), len(data))
        ends = accumulate(len(self.token_bytes[token_id]) for token_id in ids)
        return [token_id for token_id, end in zip(ids, ends, strict=True) if end <= settled]

    def _goes_on(self, beginning: bytes) -> bool:
        """Return True if a longer token starts with these bytes."""
        at = bisect_right(self._sorted, beginning)
        return at < len(self._sorted) and self._sorted[at].startswith(beginning)

    def _without_mark(self, ids: list[int]) -> list[int]:
        seen = b""
        for index, token_id in enumerate(ids):
            seen += self.token_bytes[token_id] if token_id < len(self.token_bytes) else b""
            if seen.endswith(_MARK.encode()):
                return ids[index + 1 :]
        return []

    @cached_property
    def _sorted(self) -> list[bytes]:
        return sorted(set(self.token_bytes))

    @cached_property
    def _id_by_bytes(self) -> dict[bytes, int]:
        return {token: i for i, token in reversed(list(enumerate(self.token_bytes))) if token}

    @cached_property
    def _longest(self) -> int:
        return max(map(len, self.token_bytes), default=1)


SLOW_SECONDS = 0.02  # time of a mask above which it counts
MOST_EXCESS_SECONDS = 0.5  # limit of the time above that, for all masks of a grammar together
_BYTES_PER_SOURCE_BYTE = 80  # memory of a compiled grammar: 25 to 39 MB for 442 KiB
_REFUND = 0.005  # share of SLOW_SECONDS that a quick mask restores


@final
class LlguidanceBackend:
    def __init__(self, vocabulary: Vocabulary) -> None:
        self._library = importlib.import_module("llguidance")
        self._vocabulary = vocabulary
        self._num_ids = len(vocabulary.token_bytes)
        ends = [end for end in vocabulary.end_ids if end < self._num_ids]
        self._tokenizer = self._library.LLTokenizer(
            self._library.TokenizerWrapper(_Spelling(vocabulary, ends[0] if ends else self._num_ids)),
            eos_token=ends or [self._num_ids],
        )

    def compile(self, source: Source) -> tuple["_Compiled", int]:
        limits = llguidance_limits(self._library, source.text)
        matcher = self._library.LLMatcher(self._tokenizer, source.text, log_level=0, limits=limits)
        return _Compiled(matcher), _BYTES_PER_SOURCE_BYTE * len(source.text)

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
        self._words = np.zeros(-(-num_ids // 32), dtype=np.int32)
        self._place = self._words.ctypes.data, self._words.nbytes
        self._rest = vocabulary.vocab_size % 32

    def fill(self, mask: Mask) -> None:
        started = thread_time()
        self._matcher.unsafe_compute_mask_ptr(*self._place)
        self._spend(thread_time() - started)
        if self._matcher.is_error():
            self._fail()
        self._copy_to(mask)

    def _copy_to(self, mask: Mask) -> None:
        """Copy the library's words, of which there may be more or fewer. A copy takes 3 µs."""
        num_words = min(len(mask), len(self._words))
        mask[:num_words] = self._words[:num_words]
        mask[num_words:] = 0
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
            matcher.unsafe_compute_mask_ptr(*self._place)
            self._spend(thread_time() - started)
            self._copy_to(mask)
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
        problem = self._matcher.get_error().strip().partition("\n")[0]
        raise ConstraintError(f"the grammar cannot be followed further: {problem:.300}")

    def rollback(self, num_tokens: int) -> None:
        self._matcher.rollback(num_tokens)
        if self._matcher.is_error():
            self._fail()

    def forced(self) -> Sequence[int]:
        end_ids = self._vocabulary.end_ids
        return [*takewhile(lambda token_id: token_id not in end_ids, self._matcher.compute_ff_tokens())]

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


@final
class XgrammarBackend:
    def __init__(self, vocabulary: Vocabulary) -> None:
        self._library = importlib.import_module("xgrammar")
        self._vocabulary = vocabulary
        info = self._library.TokenizerInfo(
            vocabulary.token_bytes,
            self._library.VocabType.RAW,
            vocab_size=vocabulary.vocab_size,
            stop_token_ids=list(vocabulary.end_ids),
        )
        self._compiler = self._library.GrammarCompiler(info, max_threads=1, cache_enabled=False)
        text_ids = [token_id for token_id, token in enumerate(vocabulary.token_bytes) if token]
        self._text = _packed(text_ids, vocabulary.vocab_size)
        self._known = _packed([*text_ids, *vocabulary.end_ids], vocabulary.vocab_size)

    def compile(self, source: Source) -> tuple[Any, int]:
        compiled = compile_with_xgrammar(self._compiler, self._library, source.kind, source.text)
        return compiled, int(compiled.memory_size_bytes)

    def make_matcher(self, compiled: Any) -> Matcher:
        matcher = self._library.GrammarMatcher(compiled, terminate_without_stop_token=not self._vocabulary.end_ids)
        return _XgrammarMatcher(matcher, self._vocabulary, self._text, self._known)


@final
class _XgrammarMatcher(Matcher):
    def __init__(self, matcher: Any, vocabulary: Vocabulary, text: Mask, known: Mask) -> None:
        """Wrap a matcher. `text` are the tokens that have bytes; `known` are these and the end ids."""
        self._matcher = matcher
        self._vocabulary = vocabulary
        self._text, self._known = text, known
        self._words = np.zeros((1, len(self._known)), dtype=np.int32)

    def fill(self, mask: Mask) -> None:
        self._fill_words()
        mask[:] = self._words[0]

    def accept(self, token_id: int) -> bool:
        known = 0 <= token_id < len(self._vocabulary.token_bytes)
        return known and bool(self._matcher.accept_token(token_id))

    def rollback(self, num_tokens: int) -> None:
        self._matcher.rollback(num_tokens)

    def forced(self) -> Sequence[int]:
        if self._matcher.is_terminated():
            return []
        try:
            text = self._matcher.find_jump_forward_string()
        except UnicodeDecodeError:  # the forced bytes begin inside a character
            return []
        return self._vocabulary.settled(text) if text else []

    def may_end(self) -> bool:
        return bool(self._matcher.is_completed())

    def is_stopped(self) -> bool:
        if self._matcher.is_terminated():
            return True
        if not self._matcher.is_completed():
            return False
        self._fill_words()
        return not (self._words[0] & self._text).any()

    def _fill_words(self) -> None:
        """Write all known tokens that the library allows.

        The library leaves the row unchanged if it allows every token. In that case all bits are set.
        """
        if not self._matcher.fill_next_token_bitmask(self._words):
            self._words[:] = -1
        self._words[0] &= self._known


def _packed(token_ids: list[int], vocab_size: int) -> Mask:
    bits = np.zeros(-(-vocab_size // 32) * 32, dtype=bool)
    bits[token_ids] = True
    return np.packbits(bits, bitorder="little").view(np.int32)


# A library for one vocabulary. Sequences share compiled grammars, and each sequence has its own matcher. `compile`
# returns a compiled grammar and its memory in bytes, measured or estimated, of a source that another process has tried.
GrammarBackend = LlguidanceBackend | XgrammarBackend
