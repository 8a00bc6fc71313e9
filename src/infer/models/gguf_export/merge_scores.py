"""Merges of byte-pair encoding, and the scores of tokens that replace them in SentencePiece's form."""

import json
from collections.abc import Sequence

from tokenizers.models import BPE

from infer.text.tokenizer.gguf_vocabulary import TokenType

_NOT_MERGED = -1000.0  # score of tokens that are found before a text is split, as in llama.cpp's converter


def merges_of(model: BPE) -> list[tuple[str, str]]:
    """Return the merges of a model in their order."""
    given = json.loads(model.__getstate__())["merges"]
    pairs = (merge.split(" ", 1) if isinstance(merge, str) else merge for merge in given)
    return [(left, right) for left, right in pairs]


def scores_of(texts: Sequence[str], types: Sequence[int], merges: Sequence[tuple[str, str]]) -> list[float]:
    """Return a score for each token: minus the place of the first merge that makes it, among all made tokens.

    Tokens that no merge makes follow the others, in the order of their ids.
    """
    place: dict[str, int] = {}
    for left, right in merges:
        place.setdefault(left + right, len(place))
    scores, num_made = list[float](), len(place)
    for text, kind in zip(texts, types, strict=True):
        if kind in (TokenType.CONTROL, TokenType.UNKNOWN, TokenType.BYTE):
            scores.append(0.0)
        elif kind != TokenType.NORMAL:
            scores.append(_NOT_MERGED)
        else:
            made = place.get(text)
            scores.append(-float(num_made if made is None else made))
            num_made += made is None
    return scores
