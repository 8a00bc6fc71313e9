"""Constraints by llguidance, the default: an Earley parser over derivatives of patterns, compiled in a millisecond.

The package is loaded when the first grammar is compiled.
"""

import importlib
import json
from collections.abc import Sequence
from typing import Any, NoReturn, final

import numpy as np

from infer.errors import ConstraintError
from infer.grammar.backend import Backend, Source
from infer.grammar.base import Grammar, Mask
from infer.grammar.matcher import Matcher
from infer.grammar.sandbox_child import llguidance_limits
from infer.grammar.vocabulary import Vocabulary


@final
class LlguidanceBackend(Backend):
    name = "llguidance"
    keywords = None

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._library = importlib.import_module("llguidance")
        self._vocabulary = vocabulary
        self._num_ids = len(vocabulary.token_bytes)
        ends = [end for end in vocabulary.end_ids if end < self._num_ids]
        self._tokenizer = self._library.LLTokenizer(
            self._library.TokenizerWrapper(_Spelling(vocabulary, ends[0] if ends else self._num_ids)),
            eos_token=ends or [self._num_ids],
        )

    def source(self, grammar: Grammar) -> Source:
        make = self._library.LLMatcher
        if grammar.kind == "regex":
            return Source("", make.grammar_from_regex(grammar.text))
        if grammar.kind == "grammar":
            return Source("", make.grammar_from_lark(grammar.text))
        if grammar.kind == "choice":
            options = " | ".join(json.dumps(text) for text in json.loads(grammar.text))
            return Source("", make.grammar_from_lark(f"start: CHOICE\nCHOICE: {options}"))  # one item of the parser
        return schema_source(self._library, grammar.text)

    def compile(self, source: Source) -> Any:
        limits = llguidance_limits(self._library, source.text)
        return self._library.LLMatcher(self._tokenizer, source.text, log_level=0, limits=limits)

    def make_matcher(self, compiled: Any) -> Matcher:
        return _LlguidanceMatcher(compiled.deep_copy(), self._vocabulary, self._tokenizer.vocab_size)


@final
class _LlguidanceMatcher(Matcher):
    def __init__(self, matcher: Any, vocabulary: Vocabulary, num_ids: int) -> None:
        self._matcher = matcher
        self._vocabulary = vocabulary
        self._num_ids = len(vocabulary.token_bytes)
        self._own = np.zeros(-(-num_ids // 32), dtype=np.int32)
        self._num_words, self._num_bytes = len(self._own), self._own.nbytes
        self._rest = vocabulary.vocab_size % 32
        self._mask: Mask | None = None  # whose address is known
        self._where = 0

    def fill(self, mask: Mask) -> None:
        self._matcher.unsafe_compute_mask_ptr(self._address(mask), self._num_bytes)
        if self._matcher.is_error():
            self._fail()
        self._complete(mask)

    def _address(self, mask: Mask) -> int:
        """Of the caller's memory where it is large enough."""
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
        if self._rest:  # an end id of our own making lies after the vocabulary
            mask.view(np.uint32)[self._vocabulary.vocab_size // 32] &= (1 << self._rest) - 1

    def advance(self, token_id: int, mask: Mask, is_last: bool) -> bool:
        """Four calls in place of six: what is consumed unasked was allowed, and whoever fails has stopped."""
        matcher = self._matcher
        if not matcher.consume_token(token_id):
            self._fail()
        if matcher.compute_ff_tokens():
            return False
        if not is_last:
            matcher.unsafe_compute_mask_ptr(self._address(mask), self._num_bytes)
            if self._rest or len(mask) != self._num_words:
                self._complete(mask)
        return not matcher.is_stopped()

    def accept(self, token_id: int) -> bool:
        if not 0 <= token_id < self._num_ids:
            return False
        if self._matcher.try_consume_tokens([token_id]) == 1:
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
    """What llguidance asks of a tokenizer. It must not raise: an exception here is a panic there."""

    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary, eos_token_id: int) -> None:
        self._spell = vocabulary.spell
        self.eos_token_id = eos_token_id
        padding = [b""] * (eos_token_id + 1 - len(vocabulary.token_bytes))
        self.tokens = [*vocabulary.token_bytes, *padding]
        for token_id in vocabulary.control_ids:  # tokens of the same bytes are allowed together
            self.tokens[token_id] = b"[%d]" % token_id
        self.special_token_ids = vocabulary.control_ids

    def __call__(self, text: str | bytes) -> list[int]:
        return self._spell(text.decode(errors="replace") if isinstance(text, bytes) else text)


def schema_source(library: Any, text: str) -> Source:
    """Of a schema that is built; with the spaces of Python's `json.dumps`."""
    separators = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
    schema = json.loads(text)
    if not isinstance(schema, dict):  # true: any JSON; false is refused before
        schema = {}
    return Source("", library.LLMatcher.grammar_from_json_schema(schema, overrides=separators))


def first_line(message: str) -> str:
    return message.strip().partition("\n")[0][:300]
