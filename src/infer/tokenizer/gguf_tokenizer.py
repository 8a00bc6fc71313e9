"""A `tokenizers` backend from the key-values of a GGUF file.

A GGUF names its pre-tokenizer (`tokenizer.ggml.pre`) instead of spelling it out; the tables below spell them out as the
models' own `tokenizer.json` do. Source: llama.cpp, `src/llama-vocab.cpp`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from infer.errors import ModelFormatError, UnsupportedModelError
from infer.tokenizer.settings import check_metadata

Integers = npt.NDArray[np.int64]
Hashes = npt.NDArray[np.uint64]

_SPACE_MARK = "▁"
_HASH_BASE = 0x9E3779B97F4A7C15
_HASH_MIX = 0xD6E8FEB86659FD93
_SLOT_BITS = 22
_CHUNK = 16_384  # tokens whose arrays stay in a core's cache


class TokenType(IntEnum):
    """`tokenizer.ggml.token_type`."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


_ADDED_TYPES = (TokenType.UNKNOWN, TokenType.CONTROL, TokenType.USER_DEFINED)


@dataclass(frozen=True)
class PreTokenizer:
    """How text is cut into words before byte-pair encoding: each pattern cuts the pieces of the one before."""

    patterns: tuple[str, ...] = ()
    individual_digits: bool = False
    gpt2_words: bool = False
    """Also cut by GPT-2's own pattern."""
    composes: bool = False
    """Unicode NFC first."""
    ignore_merges: bool = False
    """A word that is in the vocabulary is that token, whatever the merges say."""
    adds_bos: bool = False


_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS_AND_SPACES = (
    r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{DIGITS}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"  # {DIGITS}: 1 or 1,3
)
_CASED_WORD = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+SUFFIX"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*SUFFIX"
    r"|\p{N}{DIGITS}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_GPT2_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = f"{_CONTRACTIONS}|{_WORDS_AND_SPACES.replace('DIGITS', '1,3')}"
_QWEN2 = f"{_CONTRACTIONS}|{_WORDS_AND_SPACES.replace('{DIGITS}', '')}"
_TEKKEN = _CASED_WORD.replace("SUFFIX", "").replace("{DIGITS}", "")
_GPT4O = _CASED_WORD.replace("SUFFIX", f"{_CONTRACTIONS}?").replace("DIGITS", "1,3")

_STARCODER = PreTokenizer(individual_digits=True, gpt2_words=True)
_LLAMA_BPE = PreTokenizer((_LLAMA3,), ignore_merges=True, adds_bos=True)
PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    "default": PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2_WORDS, r"\p{N}+", r"[0-9][0-9][0-9]")),
    "gpt-2": PreTokenizer(gpt2_words=True),
    "phi-2": PreTokenizer(gpt2_words=True),
    "smollm": _STARCODER,
    "starcoder": _STARCODER,
    "refact": _STARCODER,
    "codeshell": _STARCODER,
    "llama-bpe": _LLAMA_BPE,
    "llama3": _LLAMA_BPE,
    "llama-v3": _LLAMA_BPE,
    "smaug-bpe": PreTokenizer((_LLAMA3,)),
    "dbrx": PreTokenizer((_LLAMA3,)),
    "qwen2": PreTokenizer((_QWEN2,), composes=True),
    "deepseek-r1-qwen": PreTokenizer((_QWEN2,)),
    "tekken": PreTokenizer((_TEKKEN,), ignore_merges=True, adds_bos=True),
    "gpt-4o": PreTokenizer((_GPT4O,)),
    "llama4": PreTokenizer((_GPT4O,), adds_bos=True),
}


class GGUFBackend(NamedTuple):
    backend: Tokenizer
    token_texts: list[str]
    """By id, as the backend knows them: llama.cpp writes user-defined tokens with their spaces in the clear."""


def make_gguf_backend(metadata: Mapping[str, Any]) -> GGUFBackend:
    """Ids are the positions in `tokenizer.ggml.tokens`.

    Raises `UnsupportedModelError` for a tokenizer or pre-tokenizer that we do not know, `ModelFormatError` for
    metadata that contradict themselves.
    """
    check_metadata(metadata)
    model = metadata.get("tokenizer.ggml.model")
    if model not in ("gpt2", "llama"):
        raise UnsupportedModelError(f"tokenizer {model!r} is not supported; supported: 'gpt2', 'llama'")
    texts = _list_of(metadata, "tokenizer.ggml.tokens", str)
    types: list[int] = [TokenType.NORMAL] * len(texts)
    if "tokenizer.ggml.token_type" in metadata:
        types = _list_of(metadata, "tokenizer.ggml.token_type", int, len(texts))
    if model == "llama":
        for token_id, token_type in enumerate(types):
            if token_type == TokenType.USER_DEFINED:
                texts[token_id] = texts[token_id].replace(" ", _SPACE_MARK)
    vocabulary = {text: token_id for token_id, text in enumerate(texts)}
    make_backend = _make_byte_level if model == "gpt2" else _make_sentencepiece
    backend = make_backend(metadata, vocabulary, texts, types)
    backend.add_tokens(
        [
            AddedToken(text, special=token_type != TokenType.USER_DEFINED, normalized=False)
            for text, token_type in zip(texts, types, strict=True)
            if text and token_type in _ADDED_TYPES
        ]
    )
    backend.post_processor = _make_post_processor(backend, metadata, texts)
    return GGUFBackend(backend, texts)


def default_adds_bos(metadata: Mapping[str, Any]) -> bool:
    """What a file without `tokenizer.ggml.add_bos_token` means."""
    if metadata.get("tokenizer.ggml.model") == "llama":
        return True
    return _pre_tokenizer(metadata).adds_bos


def _make_byte_level(
    metadata: Mapping[str, Any], vocabulary: dict[str, int], texts: list[str], types: list[int]
) -> Tokenizer:
    pre_tokenizer = _pre_tokenizer(metadata)
    merges = [_split_merge(merge) for merge in _list_of(metadata, "tokenizer.ggml.merges", str)]
    backend = Tokenizer(_make_bpe(vocabulary, merges, ignore_merges=pre_tokenizer.ignore_merges))
    if pre_tokenizer.composes:
        backend.normalizer = normalizers.NFC()
    steps: list[pre_tokenizers.PreTokenizer] = [
        pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in pre_tokenizer.patterns
    ]
    if pre_tokenizer.individual_digits:
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pre_tokenizer.gpt2_words))
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
    backend.decoder = decoders.ByteLevel()
    return backend


def _make_sentencepiece(
    metadata: Mapping[str, Any], vocabulary: dict[str, int], texts: list[str], types: list[int]
) -> Tokenizer:
    scores = _list_of(metadata, "tokenizer.ggml.scores", (float, int), len(texts))
    unknown_id = metadata.get("tokenizer.ggml.unknown_token_id")
    unknown = texts[unknown_id] if isinstance(unknown_id, int) and 0 <= unknown_id < len(texts) else None
    merges = _derive_merges(texts, scores, types)
    backend = Tokenizer(_make_bpe(vocabulary, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    to_mark = normalizers.Replace(" ", _SPACE_MARK)
    steps: list[decoders.Decoder] = [
        decoders.Replace(_SPACE_MARK, " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
    ]
    if metadata.get("tokenizer.ggml.add_space_prefix", True):
        backend.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE_MARK), to_mark])
        steps.append(decoders.Strip(" ", 1, 0))
    else:
        backend.normalizer = to_mark
    backend.decoder = decoders.Sequence(steps)
    return backend


def _derive_merges(texts: list[str], scores: Sequence[float], types: list[int]) -> list[tuple[str, str]]:
    """Every way to make a token from two, best score first, then the longest left part, as Hugging Face sorts them.

    Runs of whitespace and tags that the trainer was given come before all that it learnt; they have no score.
    """
    splits = _find_splits(texts)
    type_of = np.asarray(types)
    is_given = type_of == TokenType.USER_DEFINED
    _, rank = np.unique(np.where(is_given, -np.inf, -np.asarray(scores, dtype=np.float64)), return_inverse=True)
    longest = int(max(splits.left_lengths.max(initial=0), splits.right_lengths.max(initial=0))) + 1
    # `whole` grows from row to row, so that a stable sort settles the rest.
    key = (rank[splits.whole] * longest - splits.left_lengths) * longest - splits.right_lengths
    order = np.argsort(key, kind="stable")
    order = order[(is_given | (type_of == TokenType.NORMAL))[splits.whole[order]]]
    lefts = map(texts.__getitem__, splits.left[order].tolist())
    rights = map(texts.__getitem__, splits.right[order].tolist())
    return list(zip(lefts, rights, strict=True))


class _Splits(NamedTuple):
    """Row i: token `whole[i]` is token `left[i]` followed by token `right[i]`."""

    whole: Integers
    left: Integers
    right: Integers
    left_lengths: Integers
    right_lengths: Integers


def _find_splits(texts: list[str]) -> _Splits:
    """All of them, in a few passes over the vocabulary's characters.

    A text's hash is `sum(character × base^place)` modulo 2⁶⁴, so those of all beginnings and ends are differences of
    running sums. A table with one token for each of a few million slots sorts out most of Gemma's 2 million and finds
    most of the others; those whose slot another token holds are looked up among the sorted hashes.
    """
    lengths = np.fromiter(map(len, texts), dtype=np.int64, count=len(texts))
    longest = int(lengths.max(initial=0))
    powers, inverses = (_powers(base, longest) for base in (_HASH_BASE, pow(_HASH_BASE, -1, 2**64)))
    starts = range(0, len(texts), _CHUNK)
    beginnings = [_hash_beginnings(texts[start : start + _CHUNK], start, powers) for start in starts]
    hashes = np.concatenate([np.zeros(0, np.uint64), *(chunk.hashes for chunk in beginnings)])
    holder = np.full(2**_SLOT_BITS, -1, dtype=np.int32)
    holder[_slot(hashes)] = np.arange(len(texts))
    found: list[tuple[Integers, Integers, Hashes, Hashes]] = []
    for _, ids, places, heads in beginnings:
        kept = np.flatnonzero(holder[_slot(heads)] >= 0)
        ids, places, heads = ids[kept], places[kept], heads[kept]
        tails = (hashes[ids] - heads) * inverses[places]
        kept = np.flatnonzero(holder[_slot(tails)] >= 0)
        found.append((ids[kept], places[kept], heads[kept], tails[kept]))
    whole, left_lengths = (np.concatenate([np.zeros(0, np.int64), *(chunk[i] for chunk in found)]) for i in (0, 1))
    wanted = [np.concatenate([np.zeros(0, np.uint64), *(chunk[i] for chunk in found)]) for i in (2, 3)]
    left, right = (_look_up(of_parts, hashes, holder) for of_parts in wanted)
    right_lengths = lengths[whole] - left_lengths
    exact = (hashes[left] == wanted[0]) & (hashes[right] == wanted[1])
    exact &= (lengths[left] == left_lengths) & (lengths[right] == right_lengths)
    return _Splits(*(column[exact] for column in (whole, left, right, left_lengths, right_lengths)))


class _Beginnings(NamedTuple):
    """The hashes of some tokens, and of all their beginnings but the whole: `heads[i]` is that of the first `places[i]`
    characters of token `ids[i]`."""

    hashes: Hashes
    ids: Integers
    places: Integers
    heads: Hashes


def _hash_beginnings(texts: list[str], first_id: int, powers: Hashes) -> _Beginnings:
    lengths = np.fromiter(map(len, texts), dtype=np.int64, count=len(texts))
    characters = np.frombuffer("".join(texts).encode("utf-32-le", "surrogatepass"), dtype=np.uint32)
    ends = np.cumsum(lengths)
    ids = np.repeat(np.arange(len(texts)), lengths)
    places = np.arange(len(characters)) - (ends - lengths)[ids]
    mixed = (characters.astype(np.uint64) + np.uint64(1)) * np.uint64(_HASH_MIX)
    mixed ^= mixed >> np.uint64(32)
    mixed *= powers[places]
    sums = np.concatenate([np.zeros(1, np.uint64), np.cumsum(mixed, dtype=np.uint64)])
    before = sums[ends - lengths]
    inner = np.flatnonzero(places + 1 < lengths[ids])
    heads = sums[inner + 1] - before[ids[inner]]
    return _Beginnings(sums[ends] - before, ids[inner] + first_id, places[inner] + 1, heads)


def _look_up(wanted: Hashes, hashes: Hashes, holder: npt.NDArray[np.int32]) -> Integers:
    """The token of each hash, if there is one; the slot of each is held by some token."""
    found = holder[_slot(wanted)].astype(np.int64)
    others = np.flatnonzero(hashes[found] != wanted)
    by_hash = np.argsort(hashes)
    at = np.searchsorted(hashes, wanted[others], sorter=by_hash).clip(max=len(hashes) - 1)
    found[others] = by_hash[at]
    return found


def _powers(base: int, largest: int) -> Hashes:
    return np.cumprod(np.array([1] + [base] * largest, dtype=np.uint64), dtype=np.uint64)


def _slot(hashes: Hashes) -> Hashes:
    return (hashes * np.uint64(_HASH_MIX)) >> np.uint64(64 - _SLOT_BITS)


def _make_bpe(vocabulary: dict[str, int], merges: list[tuple[str, str]], **options: Any) -> models.BPE:
    try:
        return models.BPE(vocabulary, merges, **options)
    except Exception as error:  # tokenizers raises the bare class
        raise ModelFormatError("GGUF metadata", "tokenizer.ggml.merges", str(error)) from error


def _make_post_processor(
    backend: Tokenizer, metadata: Mapping[str, Any], texts: list[str]
) -> processors.TemplateProcessing:
    """BOS before and EOS after, as `add_bos_token` and `add_eos_token` ask."""
    wanted: list[str | None] = []
    for name, default in (("bos", default_adds_bos(metadata)), ("eos", False)):
        token_id = metadata.get(f"tokenizer.ggml.{name}_token_id")
        if token_id is None or not metadata.get(f"tokenizer.ggml.add_{name}_token", default):
            wanted.append(None)
        elif 0 <= token_id < len(texts):
            wanted.append(texts[token_id])
        else:
            raise ModelFormatError("GGUF metadata", f"tokenizer.ggml.{name}_token_id", f"{token_id} is not an id")
    return make_bos_eos_processor(backend, *wanted)


def make_bos_eos_processor(backend: Tokenizer, bos: str | None, eos: str | None) -> processors.TemplateProcessing:
    """Puts `bos` before a text and `eos` after it, where they are given."""
    pieces = [piece for piece in (bos, "$A", eos) if piece is not None]
    special_tokens = [(text, backend.token_to_id(text)) for text in dict.fromkeys((bos, eos)) if text is not None]
    for text, token_id in special_tokens:
        if token_id is None:
            raise ModelFormatError("tokenizer", "bos or eos token", f"{text!r:.80} is not in the vocabulary")
    return processors.TemplateProcessing(single=pieces, pair=None, special_tokens=special_tokens)


def _pre_tokenizer(metadata: Mapping[str, Any]) -> PreTokenizer:
    name = metadata.get("tokenizer.ggml.pre", "default")
    if name not in PRE_TOKENIZERS:
        supported = ", ".join(PRE_TOKENIZERS)
        raise UnsupportedModelError(f"pre-tokenizer {name!r} is not supported; supported: {supported}")
    return PRE_TOKENIZERS[name]


def _split_merge(merge: str) -> tuple[str, str]:
    space = merge.find(" ", 1)  # a token may begin with one
    if space < 0:
        raise ModelFormatError("GGUF metadata", "tokenizer.ggml.merges", f"{merge!r} is not two tokens")
    return merge[:space], merge[space + 1 :]


def _list_of(
    metadata: Mapping[str, Any], key: str, item_type: type | tuple[type, ...], length: int | None = None
) -> list[Any]:
    value = metadata.get(key)
    if value is None:
        raise ModelFormatError("GGUF metadata", key, "missing")
    items: list[Any] = value.tolist() if isinstance(value, np.ndarray) else list(value)
    if length is not None and len(items) != length:
        raise ModelFormatError("GGUF metadata", key, f"has {len(items)} items, expected {length}")
    if items and not isinstance(items[0], item_type):
        raise ModelFormatError("GGUF metadata", key, f"holds {type(items[0]).__name__}")
    return items
