"""Constraints by xgrammar, an extra: a pushdown automaton compiled in advance for the whole vocabulary.

The package and torch are loaded when the first grammar is compiled. It enforces fewer JSON-schema keywords than
llguidance and ignores the others; here they are refused. Keywords that it handles wrongly are refused, too: with
`minLength` or `maxLength` it allows control characters in strings (0.2.8), and it anchors every `pattern`.
"""

import importlib
from collections.abc import Sequence
from typing import Any, final

import numpy as np
import numpy.typing as npt

from infer.text.grammar.constraint import Mask
from infer.text.grammar.grammar import Source
from infer.text.grammar.libraries import compile_with_xgrammar
from infer.text.grammar.matcher import GrammarBackend, Matcher
from infer.text.grammar.vocabulary import Vocabulary


@final
class XgrammarBackend(GrammarBackend):
    name = "xgrammar"

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
        self._text = _packed([bool(token) for token in vocabulary.token_bytes], vocabulary.vocab_size)
        is_end = np.zeros(vocabulary.vocab_size, dtype=bool)
        is_end[list(vocabulary.end_ids)] = True
        self._known = self._text | _packed(is_end, vocabulary.vocab_size)

    def compile(self, source: Source) -> Any:
        return compile_with_xgrammar(self._compiler, self._library, source.kind, source.text)

    def num_bytes(self, compiled: Any, source: Source) -> int:
        return int(compiled.memory_size_bytes)

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


def _packed(is_set: npt.ArrayLike, vocab_size: int) -> Mask:
    bits = np.zeros(-(-vocab_size // 32) * 32, dtype=bool)
    values = np.asarray(is_set, dtype=bool)
    bits[: len(values)] = values
    return np.packbits(bits, bitorder="little").view(np.int32)
