"""Vocabularies of encoders' tokenizers in GGUF's forms: the inverse of `tokenizer.gguf_encoders`."""

import base64
import json
from collections.abc import Iterator, Mapping
from typing import Any

from tokenizers import Tokenizer

from infer.models.gguf_export.values import Value
from infer.text.tokenizer.gguf_vocabulary import TokenType
from infer.text.tokenizer.wordpiece import PREFIX

_WORD_MARK = "▁"
_UNUSED_SCORE = -10000.0  # the score that llama.cpp's converter writes


def wordpiece_values(backend: Tokenizer, texts: list[str], types: list[int]) -> dict[str, Value]:
    """Return the keys of WordPiece: words begin with ▁, and other parts have no mark."""
    marked = [
        text
        if kind != TokenType.NORMAL
        else text.removeprefix(PREFIX)
        if text.startswith(PREFIX)
        else _WORD_MARK + text
        for text, kind in zip(texts, types, strict=True)
    ]
    values: dict[str, Value] = {
        "tokenizer.ggml.model": "bert",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": marked,
        "tokenizer.ggml.token_type": types,
    }
    for step in _normalizers(backend):
        for name in ("lowercase", "strip_accents"):
            if isinstance(step.get(name), bool):
                values[f"tokenizer.ggml.normalizer.{name}"] = step[name]
    return values


def unigram_values(backend: Tokenizer, texts: list[str], types: list[int]) -> Iterator[dict[str, Value]]:
    """Yield the keys of Unigram with each way to treat blanks. The caller finds the way of the tokenizer."""
    model = json.loads(backend.model.__getstate__())
    scores = [_UNUSED_SCORE] * len(texts)
    for token_id, (_, score) in enumerate(model["vocab"][: len(texts)]):
        scores[token_id] = score
    types = list(types)
    types[model["unk_id"]] = TokenType.UNKNOWN.value
    values: dict[str, Value] = {
        "tokenizer.ggml.model": "t5",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": texts,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.unknown_token_id": model["unk_id"],
    }
    for step in _normalizers(backend):
        if step["type"] == "Precompiled":
            values["tokenizer.ggml.precompiled_charsmap"] = base64.b64decode(step["precompiled_charsmap"])
    for has_prefix in (True, False):
        for removes in (True, False):
            yield values | {
                "tokenizer.ggml.add_space_prefix": has_prefix,
                "tokenizer.ggml.remove_extra_whitespaces": removes,
            }


def _normalizers(backend: Tokenizer) -> list[Mapping[str, Any]]:
    state = json.loads(backend.normalizer.__getstate__()) if backend.normalizer is not None else None
    return [] if state is None else list(state.get("normalizers", [state]))
