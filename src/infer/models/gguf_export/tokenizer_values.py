"""A folder's tokenizer → `tokenizer.*` of a GGUF file: the inverse of `tokenizer.tokenizer_files.read_gguf`.

The result is read back, and a text in many languages must get the same ids. So a tokenizer is written exactly or
refused.

The name of the rules that split a text into words is found by their effect. They must split a text with every sequence
of three kinds of characters in the same places as the tokenizer's own. Otherwise no name is written, because a wrong
name changes tokens silently.
"""

import base64
import json
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path

from tokenizers import Tokenizer
from tokenizers.models import BPE, Unigram, WordPiece

from infer.errors import UnsupportedModelError
from infer.files.gguf.forms import form_of
from infer.files.gguf.gguf_writer import Value
from infer.text.tokenizer.gguf_encoders import PREFIX
from infer.text.tokenizer.gguf_vocabulary import END_NAMES, TokenType
from infer.text.tokenizer.pre_tokenizers import PRE_TOKENIZERS, WITH_SCORES, PreTokenizer
from infer.text.tokenizer.tokenizer_files import GGUF_NAMES, TokenizerParts, read_folder, read_gguf
from infer.text.tokenizer.tokenizers_library import ids_around, steps_of

# One character of each kind in patterns: letters by case and script, marks, numbers, spaces, punctuation.
_KINDS = (
    "aSéЖǅʰ中ひカ한ขا\u0301ि"
    "1٣Ⅷ½ \t\n\r\u00a0\u3000"
    ".'!/_-$+^©“，。😀\u200d"
)  # fmt: skip
_SPLIT_TEXTS = (
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
    texts = [*_SPLIT_TEXTS, _all_triples()]
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


_ID_NAMES = {name: own for own, name in GGUF_NAMES.items() if own != "cls"}
_SPACE_MARK = "▁"
_BYTE = re.compile("<0x[0-9A-F]{2}>")
_NOT_IN_GGUF = ("dropout", "continuing_subword_prefix", "end_of_word_suffix")
_TEXTS = (
    "Hello, world! It's 12345.678 — naïve café, Straße.\n\n\tdef f(x):  return x**2   # ok\r\n",
    "Привет, мир. Ελληνικά; עברית, العربية ١٢٣. हिन्दी में पाठ, ไทยภาษา, 日本語のテキスト。",
    "中文分词，测试！한국어 문장 👩‍👩‍👧😀",
    " leading space, trailing space ",
    "e\u0301 \ufb01 \u00a0\u3000\u200d \x07 \U0001f9ff\U00020000",
    "",
)
_UNUSED_SCORE = -10000.0  # the score that llama.cpp's converter writes


def tokenizer_values(path: Path, architecture: str, vocab_size: int) -> dict[str, Value]:
    """Return the keys of a folder's tokenizer and chat templates.

    Args:
        path: The folder.
        architecture: The architecture's name in GGUF.
        vocab_size: Number of rows of the embedding. Rows without a token get names of unused tokens.

    Raises:
        UnsupportedModelError: GGUF has no form for the tokenizer. The error names the missing part.
        ModelError: The folder's files cannot be read.
    """
    parts, is_encoder = read_folder(path, vocab_size), form_of(architecture).is_encoder
    texts, types = _tokens(parts.backend, vocab_size)
    ids, templates = _special_ids(parts, reads_pairs=is_encoder), _templates(parts.chat_templates)
    problems = list[str]()
    for vocabulary in _vocabularies(path, architecture, parts.backend, texts, types):
        values = {f"tokenizer.ggml.{key}": value for key, value in (vocabulary | ids).items()} | templates
        as_read = {key: list(value) if isinstance(value, bytes) else value for key, value in values.items()}
        problem = _difference(parts.backend, read_gguf(as_read).backend, reads_pairs=is_encoder)
        if problem is None:
            return values
        problems.append(problem)
    raise UnsupportedModelError(f"{path.name}: GGUF has no form for its tokenizer: {problems[0]}")


def _tokens(backend: Tokenizer, vocab_size: int) -> tuple[list[str], list[int]]:
    """Return the texts and types of tokens by their ids."""
    texts = [f"[PAD{token_id}]" for token_id in range(vocab_size)]
    types = [TokenType.UNUSED.value] * vocab_size
    unknown = getattr(backend.model, "unk_token", None)
    for text, token_id in backend.get_vocab(with_added_tokens=True).items():
        if token_id < vocab_size:
            texts[token_id], types[token_id] = text, TokenType.NORMAL.value
    for token_id, token in backend.get_added_tokens_decoder().items():
        if token_id < vocab_size:
            kind = TokenType.CONTROL if token.special else TokenType.USER_DEFINED
            types[token_id] = (TokenType.UNKNOWN if token.content == unknown else kind).value
    return texts, types


def _vocabularies(
    path: Path, architecture: str, backend: Tokenizer, texts: list[str], types: list[int]
) -> Iterable[dict[str, Value]]:
    """Yield the tokens, and the further keys of the tokenizer's algorithm, in each form that may fit."""
    model = backend.model
    if isinstance(model, WordPiece):
        return [_wordpiece(backend, texts, types)]
    if isinstance(model, Unigram):
        return _unigrams(backend, texts, types)
    kinds = [] if isinstance(model, BPE) else [type(model).__name__]
    kinds += [name for name in _NOT_IN_GGUF if getattr(model, name, None)]
    if not isinstance(model, BPE) or kinds:
        problem = f"GGUF has no form for the tokenizer of {architecture}: {', '.join(kinds)}"
        raise UnsupportedModelError(f"{path.name}: {problem}")
    if model.byte_fallback:
        return [_marked(path, architecture, backend, texts, types)]
    pre, merges = pre_tokenizer_name(path, architecture, backend), _joined(path, merges_of(model))
    return [{"model": "gpt2", "pre": pre, "tokens": texts, "token_type": types, "merges": merges}]


def _marked(path: Path, architecture: str, backend: Tokenizer, texts: list[str], types: list[int]) -> dict[str, Value]:
    """Return the keys of SentencePiece's form, which marks spaces and has a token for each byte.

    User-defined tokens have plain spaces, except in files of Gemma 4.
    """
    assert isinstance(backend.model, BPE)
    merges, values = merges_of(backend.model), dict[str, Value](model=form_of(architecture).vocabulary)
    types = [
        TokenType.BYTE.value if kind == TokenType.NORMAL and _BYTE.fullmatch(text) else kind
        for text, kind in zip(texts, types, strict=True)
    ]
    if values["model"] != WITH_SCORES:
        values["merges"] = _joined(path, merges)
    else:
        values["pre"] = "default"
        texts = _changed(texts, types, TokenType.USER_DEFINED, lambda text: text.replace(_SPACE_MARK, " "))
    has_prefix = backend.encode("a", add_special_tokens=False).tokens[0][0] == _SPACE_MARK
    values |= {"tokens": texts, "token_type": types}
    return values | {"scores": scores_of(texts, types, merges), "add_space_prefix": has_prefix}


def _changed(texts: list[str], types: list[int], kind: TokenType, change: Callable[[str], str]) -> list[str]:
    """Return the texts, with those of one type changed."""
    return [change(text) if own == kind else text for text, own in zip(texts, types, strict=True)]


def _joined(path: Path, merges: Sequence[tuple[str, str]]) -> list[str]:
    for left, right in merges:
        if " " in left[1:] or " " in right:
            raise UnsupportedModelError(f"{path.name}: the merge {left!r:.40} + {right!r:.40} has no form in GGUF")
    return [" ".join(merge) for merge in merges]


def _special_ids(parts: TokenizerParts, *, reads_pairs: bool) -> dict[str, Value]:
    """Return the ids of special tokens, and those that are added to a text or between two texts."""
    backend = parts.backend
    named = {_ID_NAMES[name]: text for name, text in parts.named_tokens.items() if name in _ID_NAMES}
    found = {own: token_id for own, text in named.items() if (token_id := backend.token_to_id(text)) is not None}
    before, plain, after = ids_around(backend)
    ends = [*([found["eos"]] if after and "eos" in found else []), *parts.end_token_ids]
    if before:
        found["bos"] = before[0]
    if after:
        found["eos"] = after[-1]
    others = list(dict.fromkeys(token_id for token_id in ends if token_id != found.get("eos")))
    found |= dict(zip(("eot", "eom"), others, strict=False))
    lost = [text for token_id in others[2:] if (text := backend.id_to_token(token_id)) not in END_NAMES]
    if lost:
        warnings.warn(f"a GGUF file names three tokens that end an answer: {lost!r:.80} will not end one", stacklevel=3)
    values: dict[str, Value] = {f"{name}_token_id": token_id for name, token_id in found.items()}
    values |= {"add_bos_token": bool(before), "add_eos_token": bool(after)}
    if reads_pairs:
        num_between = len(backend.encode("a", "a").ids) - len(before) - 2 * len(plain) - len(after)
        values["add_sep_token"] = num_between == 2
    return values


def _templates(templates: Mapping[str, str]) -> dict[str, Value]:
    own: dict[str, Value] = {
        "tokenizer.chat_template" + ("" if name == "default" else f".{name}"): text for name, text in templates.items()
    }
    others = [name for name in templates if name != "default"]
    return own | {"tokenizer.chat_templates": others} if others else own


def _difference(backend: Tokenizer, again: Tokenizer, *, reads_pairs: bool) -> str | None:
    """Return the first difference between a tokenizer and the one that a reader makes from the file, or None."""
    if isinstance(backend.model, BPE) and (problem := _difference_of_merges(backend, again)) is not None:
        return problem
    added = backend.get_added_tokens_decoder().values()
    plain = [token.content for token in added if not (token.lstrip or token.rstrip or token.single_word)]
    turns = "".join(f"{content}a b" for content in (*plain[:20], *plain[-20:]))
    asked: list[tuple[str, str | None, bool]] = [(_TEXTS[0], _TEXTS[1], True)] * reads_pairs
    asked += [(text, None, is_whole) for text in (*_TEXTS, turns) for is_whole in (False, True)]
    for first, second, is_whole in asked:
        own, read = (each.encode(first, second, add_special_tokens=is_whole) for each in (backend, again))
        if (own.ids, own.type_ids) != (read.ids, read.type_ids):
            pairs = enumerate(zip(own.ids, read.ids, strict=False))
            at = next((index for index, pair in pairs if pair[0] != pair[1]), 0)
            found = f"the same text would be read as {read.tokens[at : at + 3]!r:.80}"
            return f"from {own.tokens[at : at + 3]!r:.80} on, {found}"
    return None


def _difference_of_merges(backend: Tokenizer, again: Tokenizer) -> str | None:
    """Return a merge that only one of two tokenizers has, or None if they merge alike.

    Merges that make the same token may have another order, and merges that make an added token are never used.
    """
    models = backend.model, again.model
    added = {token.content for token in backend.get_added_tokens_decoder().values()}
    own, read = (
        [pair for pair in merges_of(model) if "".join(pair) not in added] for model in models if isinstance(model, BPE)
    )
    if set(own) == set(read) and list(dict.fromkeys(map("".join, own))) == list(dict.fromkeys(map("".join, read))):
        return None
    other = next(iter(set(own) ^ set(read)), own[0])
    return f"its merges cannot be written as SentencePiece's scores, such as {other!r:.80}"


def _wordpiece(backend: Tokenizer, texts: list[str], types: list[int]) -> dict[str, Value]:
    """Return the keys of WordPiece: words begin with ▁, and other parts have no mark."""

    def mark(text: str) -> str:
        return text.removeprefix(PREFIX) if text.startswith(PREFIX) else _SPACE_MARK + text

    marked = _changed(texts, types, TokenType.NORMAL, mark)
    values: dict[str, Value] = {"model": "bert", "pre": "default", "tokens": marked, "token_type": types}
    for step in steps_of(backend.normalizer):
        for name in ("lowercase", "strip_accents"):
            if isinstance(step.get(name), bool):
                values[f"normalizer.{name}"] = step[name]
    return values


def _unigrams(backend: Tokenizer, texts: list[str], types: list[int]) -> Iterator[dict[str, Value]]:
    """Yield the keys of Unigram with each way to treat blanks. The caller finds the way of the tokenizer."""
    model = json.loads(backend.model.__getstate__())
    scores = [_UNUSED_SCORE] * len(texts)
    for token_id, (_, score) in enumerate(model["vocab"][: len(texts)]):
        scores[token_id] = score
    types = list(types)
    types[model["unk_id"]] = TokenType.UNKNOWN.value
    values: dict[str, Value] = {"model": "t5", "pre": "default", "tokens": texts, "scores": scores}
    values |= {"token_type": types, "unknown_token_id": model["unk_id"]}
    for step in steps_of(backend.normalizer):
        if step["type"] == "Precompiled":
            values["precompiled_charsmap"] = base64.b64decode(step["precompiled_charsmap"])
    for has_prefix, removes in product((True, False), repeat=2):
        yield values | {"add_space_prefix": has_prefix, "remove_extra_whitespaces": removes}
