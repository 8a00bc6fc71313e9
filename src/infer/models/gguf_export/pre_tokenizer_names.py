"""The name in GGUF of the rules that split a tokenizer's text into words: the inverse of `tokenizer.pre_tokenizers`.

A name is found by the effect of its rules. They must split a text with every sequence of three kinds of characters in
the same places as the tokenizer's own. Otherwise no name is written, because a wrong name changes tokens silently.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

from tokenizers import Tokenizer
from tokenizers.models import BPE

from infer.errors import UnsupportedModelError
from infer.text.tokenizer.gguf_vocabulary import TokenType
from infer.text.tokenizer.pre_tokenizers import PRE_TOKENIZERS, PreTokenizer
from infer.text.tokenizer.tokenizers_library import steps_of

# One character of each kind in patterns: letters by case and script, marks, numbers, spaces, punctuation.
_KINDS = (
    "aSéЖǅʰ中ひカ한ขا\u0301ि"
    "1٣Ⅷ½ \t\n\r\u00a0\u3000"
    ".'!/_-$+^©“，。😀\u200d"
)  # fmt: skip
_TEXTS = (
    "I'm sure they'll say 'tis, SHE'S, we'Ve, it'D, you'RE and don'T; it'safe a'llot we'redo",
    "camelCase HTMLParser iPhone ABCdef XMLHttpRequest2 snake_case __init__ a.b.c x/y/z //a\n\n/b",
    "Straße, naïve café; Ελληνικά, русский текст, עברית, العربية, हिन्दी, ไทย, 日本語テキスト",
    "中文分词，测试。한국어 문장",
    "if (x == 10) {\n\treturn [1, 22, 333, 4444, 55555, 666666, 7777777];\n}\r\n\r\n  # done...   \n    end  ",
    "1 12 123 1234 12345 123456 1234567 12345678 123456789 3.14159 ½ ٣٤٥٦٧ Ⅷ a1b22c333d4444 x12345y",
    "😀😀 👩‍👩‍👧 ©®™ «quote» “quote” (((nested))) !!!??? --- === $100 €5 +1-2*3",
    *(" " * count + word for count in range(1, 10) for word in ("a", "1", ".", "中", "\n", "")),
    *("\n" * count + " " * count + "b" for count in range(1, 5)),
)


_NOT_MERGED = -1000.0  # score of tokens that are found before a text is split, as in llama.cpp's converter


def pre_tokenizer_name(path: Path, architecture: str, backend: Tokenizer) -> str:
    """Return the value of `tokenizer.ggml.pre` for the tokenizer of byte-level BPE in a folder.

    Among names with the same rules, the architecture's own name is preferred.

    Raises:
        UnsupportedModelError: No rules with a name in GGUF split text like this tokenizer.
    """
    model, composes = backend.model, _composes(path, backend)
    assert isinstance(model, BPE)
    ignores_merges = bool(model.ignore_merges)
    fitting = _names_that_cut_alike(backend, composes=composes)
    exact = [name for name in fitting if PRE_TOKENIZERS[name].ignore_merges == ignores_merges]
    if not exact and fitting and _reaches_all_tokens(backend, model):  # in this case the flag has no effect
        exact = fitting
    if not exact:
        state = "null" if backend.pre_tokenizer is None else backend.pre_tokenizer.__getstate__().decode()
        what = f"with ignore_merges={ignores_merges} merges text" if fitting else "splits text"
        raise UnsupportedModelError(
            f"{path.name}: no pre-tokenizer with a name in GGUF {what} like its tokenizer: {state:.400}"
        )
    return next((name for name in exact if architecture.startswith(name)), exact[0])


def _names_that_cut_alike(backend: Tokenizer, *, composes: bool) -> list[str]:
    own = backend.pre_tokenizer
    if own is None:
        return []
    texts = [*_TEXTS, _all_triples()]
    cuts = [own.pre_tokenize_str(text) for text in texts]
    found: dict[PreTokenizer, bool] = {}
    for rules in PRE_TOKENIZERS.values():
        shown = _as_cut(rules)
        if shown not in found and not rules.marks_spaces and rules.composes == composes:
            named = shown.make()
            found[shown] = all(named.pre_tokenize_str(text) == cut for text, cut in zip(texts, cuts, strict=True))
    return [
        name
        for name, rules in PRE_TOKENIZERS.items()
        if rules.composes == composes and found.get(_as_cut(rules), False)
    ]


def _as_cut(rules: PreTokenizer) -> PreTokenizer:
    """Return the rules without fields that do not affect the splits."""
    return replace(rules, composes=False, ignore_merges=False, adds_bos=False, num_separators=0)


def _composes(path: Path, backend: Tokenizer) -> bool:
    """Return True if the tokenizer applies Unicode's NFC. Raises UnsupportedModelError for another normalizer."""
    kinds = [step["type"] for step in steps_of(backend.normalizer)]
    if set(kinds) <= {"NFC"}:
        return bool(kinds)
    raise UnsupportedModelError(
        f"{path.name}: byte-level BPE with the normalizer {', '.join(kinds):.80} has no form in GGUF: only NFC has one"
    )


@cache
def _all_triples() -> str:
    """Return a text with each sequence of three kinds of characters: a de Bruijn sequence."""
    kinds = len(_KINDS)
    return "".join(_KINDS[digit] for digit in _de_bruijn(kinds, 3))


def _de_bruijn(kinds: int, length: int) -> Iterator[int]:
    """Yield the Lyndon words whose lengths divide `length`, in order (Fredricksen and Maiorana, 1978)."""
    word = [-1]
    while word:
        word[-1] += 1
        if length % len(word) == 0:
            yield from word
        while len(word) < length:
            word.append(word[-len(word)])
        while word and word[-1] == kinds - 1:
            word.pop()


def _reaches_all_tokens(backend: Tokenizer, model: BPE) -> bool:
    """Return True if the merges make each token from its characters, except added tokens."""
    vocabulary = backend.get_vocab(with_added_tokens=False)
    added = {token.content for token in backend.get_added_tokens_decoder().values()}
    plain = BPE(vocabulary, merges_of(model))
    return all(len(plain.tokenize(token)) == 1 for token in vocabulary if token not in added)


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
