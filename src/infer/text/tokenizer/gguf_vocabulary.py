"""A `tokenizers` backend from the key-values of a GGUF file.

Two dialects: byte-pair encoding with merges (`gpt2`, `gemma4`), and SentencePiece's scores (`llama`), from which merges
are derived. Source: `llama.cpp/src/llama-vocab.cpp`.
"""

from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors

from infer.errors import ModelFormatError, UnsupportedModelError
from infer.text.tokenizer.pre_tokenizers import (
    PRE_TOKENIZERS,
    WITH_MERGES,
    WITH_SCORES,
    PreTokenizer,
    pre_tokenizer_named,
)
from infer.text.tokenizer.tokenizers_library import panics_as
from infer.text.tokenizer.value_checks import check_metadata

Integers = npt.NDArray[np.int64]
Hashes = npt.NDArray[np.uint64]

END_IDS = "tokenizer.ggml.eos_token_ids"  # Ollama's converter writes all ends of a model there
_SPACE_MARK = "▁"
_HASH_BASE = 0x9E3779B97F4A7C15
_HASH_MIX = 0xD6E8FEB86659FD93
_SLOT_BITS = 22


class TokenType(IntEnum):
    """Values of `tokenizer.ggml.token_type`."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


# Names of tokens that end a turn or a text, whatever a file says about them.
END_NAMES = frozenset(
    {
        *("<|eot_id|>", "<|eom_id|>", "<|eot|>", "<|eom|>", "<|end_of_turn|>", "<end_of_turn>", "<|im_end|>"),
        *("<|return|>", "<|call|>", "<|END_OF_TURN_TOKEN|>", "<end_of_utterance>", "<turn|>", "<|tool_response>"),
        *("<|end_of_text|>", "<|endoftext|>", "<eos>"),
    }
)
# Names of tokens that only templates and calls write: the above, beginnings of turns, and Gemma 4's marks.
CONTROL_NAMES = END_NAMES | {
    *("<|end|>", "<|im_start|>", "<start_of_turn>", "<|turn>", "<|start_header_id|>", "<|end_header_id|>"),
    *("<|start_of_role|>", "<|end_of_role|>", "<|START_OF_TURN_TOKEN|>", "<|user|>", "<|assistant|>", "<|system|>"),
    *("<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", "<tool_response|>", "<|tool>", "<tool|>"),
    *("<|think|>", '<|"|>'),
}
ADDED_TYPES = (TokenType.UNKNOWN, TokenType.CONTROL, TokenType.USER_DEFINED)


def make_gguf_backend(metadata: Mapping[str, Any]) -> tuple[Tokenizer, list[str]]:
    """Return the backend and the token texts. Ids are the positions in `tokenizer.ggml.tokens`.

    The texts are in the backend's spelling: llama.cpp writes user-defined tokens with plain spaces. Raises
    `UnsupportedModelError` for an unknown tokenizer or pre-tokenizer, `ModelFormatError` for contradictory metadata.
    """
    check_metadata(metadata)
    rules = _rules(metadata)
    texts = list_of(metadata, "tokenizer.ggml.tokens")
    types = _with_control_names(metadata, texts, types_of(metadata, len(texts)))
    if rules.marks_spaces:
        for token_id, token_type in enumerate(types):
            if token_type == TokenType.USER_DEFINED:
                texts[token_id] = texts[token_id].replace(" ", _SPACE_MARK)
    vocabulary = {text: token_id for token_id, text in enumerate(texts)}
    if metadata["tokenizer.ggml.model"] == WITH_SCORES:
        merges = _derive_merges(texts, list_of(metadata, "tokenizer.ggml.scores", len(texts)), types)
    else:
        merges = [_split_merge(merge) for merge in list_of(metadata, "tokenizer.ggml.merges")]
    with panics_as(lambda problem: ModelFormatError("GGUF metadata", "tokenizer.ggml.merges", problem)):
        if rules.marks_spaces:
            backend = _make_marked(metadata, vocabulary, merges)
        else:
            backend = _make_byte_level(rules, vocabulary, merges)
    add_tokens(backend, texts, types)
    backend.post_processor = _make_post_processor(backend, metadata, texts, rules)
    return backend, texts


def without_tokens_from(num_rows: int, metadata: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the metadata without the tokens that have no row in the embedding, unless texts are spelled with them."""
    check_metadata(metadata)
    types = metadata.get("tokenizer.ggml.token_type") or ()
    if not types[num_rows:] or {TokenType.NORMAL, TokenType.BYTE}.intersection(types[num_rows:]):
        return metadata
    keys = [f"tokenizer.ggml.{name}" for name in ("tokens", "token_type", "scores")]
    return {**metadata, **{key: list_of(metadata, key)[:num_rows] for key in keys if key in metadata}}


def add_tokens(backend: Tokenizer, texts: Sequence[str], types: Sequence[int]) -> None:
    """Add the tokens that are found in a text before it is split into words."""
    backend.add_tokens(
        [
            AddedToken(text, special=kind != TokenType.USER_DEFINED, normalized=False)
            for text, kind in zip(texts, types, strict=True)
            if text and kind in ADDED_TYPES
        ]
    )


def _rules(metadata: Mapping[str, Any]) -> PreTokenizer:
    model = metadata.get("tokenizer.ggml.model")
    if model == WITH_SCORES:
        return PreTokenizer(marks_spaces=True, adds_bos=True)
    if model == WITH_MERGES:
        return PRE_TOKENIZERS[WITH_MERGES]
    if model == "gpt2":
        return pre_tokenizer_named(str(metadata.get("tokenizer.ggml.pre", "default")))
    raise UnsupportedModelError(
        f"tokenizer {model!r} is not supported: supported are 'gpt2', {WITH_SCORES!r}, {WITH_MERGES!r}, 'bert', 't5'"
    )


def _with_control_names(metadata: Mapping[str, Any], texts: list[str], types: list[int]) -> list[int]:
    """Return the types, with tokens that begin or end a turn as control tokens.

    Some converters mark them as normal or user-defined, but they are never text.
    """
    ids = {metadata.get(id_key(name)) for name in ("bos", "eos", "eot", "eom")}
    ids.update(metadata.get(END_IDS) or ())
    mistaken = (TokenType.NORMAL, TokenType.USER_DEFINED)
    return [
        TokenType.CONTROL if kind in mistaken and (token_id in ids or text in CONTROL_NAMES) else kind
        for token_id, (text, kind) in enumerate(zip(texts, types, strict=True))
    ]


def _make_byte_level(rules: PreTokenizer, vocabulary: dict[str, int], merges: list[tuple[str, str]]) -> Tokenizer:
    backend = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=rules.ignore_merges))
    if rules.composes:
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = rules.make()
    backend.decoder = decoders.ByteLevel()
    return backend


def _make_marked(metadata: Mapping[str, Any], vocabulary: dict[str, int], merges: list[tuple[str, str]]) -> Tokenizer:
    """Return a backend that writes spaces as ▁, and characters that are not in the vocabulary as bytes."""
    unknown_id = metadata.get("tokenizer.ggml.unknown_token_id")
    unknown = next((text for text, token_id in vocabulary.items() if token_id == unknown_id), None)
    backend = Tokenizer(models.BPE(vocabulary, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    to_mark = normalizers.Replace(" ", _SPACE_MARK)
    steps: list[decoders.Decoder] = [decoders.Replace(_SPACE_MARK, " "), decoders.ByteFallback(), decoders.Fuse()]
    if metadata.get("tokenizer.ggml.add_space_prefix", metadata.get("tokenizer.ggml.model") == WITH_SCORES):
        backend.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE_MARK), to_mark])
        steps.append(decoders.Strip(" ", 1, 0))
    else:
        backend.normalizer = to_mark
    backend.decoder = decoders.Sequence(steps)
    return backend


def _derive_merges(texts: list[str], scores: Sequence[float], types: list[int]) -> list[tuple[str, str]]:
    """Return all ways to make a token from two, in Hugging Face's order: best score first, then longest left part.

    Runs of whitespace, and tags that the trainer was given, come before all learnt tokens, because they have no score.
    """
    whole, left, right = _find_splits(texts)
    type_of = np.asarray(types)
    is_given = type_of == TokenType.USER_DEFINED
    _, rank = np.unique(np.where(is_given, -np.inf, -np.asarray(scores, dtype=np.float64)), return_inverse=True)
    lengths = _lengths(texts)
    longest = int(lengths.max(initial=0)) + 1
    # `whole` ascends from row to row, so a stable sort orders the rest.
    key = (rank[whole] * longest - lengths[left]) * longest - lengths[right]
    order = np.argsort(key, kind="stable")
    order = order[(is_given | (type_of == TokenType.NORMAL))[whole[order]]]
    lefts, rights = (map(texts.__getitem__, part[order].tolist()) for part in (left, right))
    return list(zip(lefts, rights, strict=True))


def _find_splits(texts: list[str]) -> tuple[Integers, Integers, Integers]:
    """Return all splits as columns: token `whole[i]` is token `left[i]` followed by token `right[i]`.

    A text's hash is `sum(character × base^place)` modulo 2⁶⁴, so the hashes of all its beginnings and ends are
    differences of running sums. A table with one token per slot, for a few million slots, rejects most of Gemma's 2
    million candidates and finds most of the others. A candidate whose slot another token occupies is looked up among
    the sorted hashes.
    """
    lengths = _lengths(texts)
    powers, inverses = (_powers(base, int(lengths.max(initial=0))) for base in (_HASH_BASE, pow(_HASH_BASE, -1, 2**64)))
    characters = np.frombuffer("".join(texts).encode("utf-32-le", "surrogatepass"), dtype=np.uint32)
    ends = np.cumsum(lengths)
    ids = np.repeat(np.arange(len(texts)), lengths)
    places = np.arange(len(characters)) - (ends - lengths)[ids]
    mixed = (characters.astype(np.uint64) + np.uint64(1)) * np.uint64(_HASH_MIX)
    mixed ^= mixed >> np.uint64(32)
    sums = np.concatenate([np.zeros(1, np.uint64), np.cumsum(mixed * powers[places], dtype=np.uint64)])
    before = sums[ends - lengths]
    hashes = sums[ends] - before
    holder = np.full(2**_SLOT_BITS, -1, dtype=np.int32)
    holder[_slot(hashes)] = np.arange(len(texts))
    inner = np.flatnonzero(places + 1 < lengths[ids])
    ids, places = ids[inner], places[inner] + 1
    heads = sums[inner + 1] - before[ids]
    kept = np.flatnonzero(holder[_slot(heads)] >= 0)
    ids, places, heads = ids[kept], places[kept], heads[kept]
    tails = (hashes[ids] - heads) * inverses[places]
    kept = np.flatnonzero(holder[_slot(tails)] >= 0)
    ids, places, heads, tails = ids[kept], places[kept], heads[kept], tails[kept]
    left, right = (_look_up(asked, hashes, holder) for asked in (heads, tails))
    exact = (hashes[left] == heads) & (hashes[right] == tails)
    exact &= (lengths[left] == places) & (lengths[right] == lengths[ids] - places)
    return ids[exact], left[exact], right[exact]


def _lengths(texts: list[str]) -> Integers:
    return np.fromiter(map(len, texts), dtype=np.int64, count=len(texts))


def _look_up(asked: Hashes, hashes: Hashes, holder: npt.NDArray[np.int32]) -> Integers:
    """Return the token of each hash, if there is one. Each hash must have a slot that a token occupies."""
    found = holder[_slot(asked)].astype(np.int64)
    others = np.flatnonzero(hashes[found] != asked)
    by_hash = np.argsort(hashes)
    at = np.searchsorted(hashes, asked[others], sorter=by_hash).clip(max=len(hashes) - 1)
    found[others] = by_hash[at]
    return found


def _powers(base: int, largest: int) -> Hashes:
    return np.cumprod(np.array([1] + [base] * largest, dtype=np.uint64), dtype=np.uint64)


def _slot(hashes: Hashes) -> Hashes:
    return (hashes * np.uint64(_HASH_MIX)) >> np.uint64(64 - _SLOT_BITS)


def _make_post_processor(
    backend: Tokenizer, metadata: Mapping[str, Any], texts: list[str], rules: PreTokenizer
) -> processors.TemplateProcessing:
    """Return a processor that adds BOS and EOS according to `add_bos_token` and `add_eos_token`."""
    ends = [
        None if metadata.get(id_key(name)) is None else added_end(metadata, texts, name, default=default)
        for name, default in (("bos", rules.adds_bos), ("eos", False))
    ]
    num_separators = 2 if metadata.get("tokenizer.ggml.add_sep_token") else rules.num_separators
    return make_bos_eos_processor(backend, *ends, num_separators=num_separators)


def make_bos_eos_processor(
    backend: Tokenizer, bos: str | None, eos: str | None, *, num_separators: int = 0
) -> processors.TemplateProcessing:
    """Return a processor that puts `bos` before a text and `eos` after it, if they are given.

    Between two texts it puts `eos` `num_separators` times: once in BERT's form, where the second text has type 1, and
    twice in RoBERTa's form.
    """
    pieces = [piece for piece in (bos, "$A", eos) if piece is not None]
    special_tokens = [(text, backend.token_to_id(text)) for text in dict.fromkeys((bos, eos)) if text is not None]
    for text, token_id in special_tokens:
        if token_id is None:
            raise ModelFormatError("tokenizer", "bos or eos token", f"{text!r:.80} is not in the vocabulary")
    pair = None
    if eos is not None and num_separators:
        second_type = int(num_separators == 1)
        pair = [*pieces, *[eos] * (num_separators - 1), f"$B:{second_type}", f"{eos}:{second_type}"]
    return processors.TemplateProcessing(single=pieces, pair=pair, special_tokens=special_tokens)


def added_end(metadata: Mapping[str, Any], texts: Sequence[str], name: str, *, default: bool) -> str | None:
    """Return the text of the token that is added at an end of each text ("bos" or "eos"), or None if none is."""
    is_added = metadata.get(f"tokenizer.ggml.add_{name}_token", default)
    return texts[checked_id(metadata, texts, name)] if is_added else None


def checked_id(metadata: Mapping[str, Any], texts: Sequence[str], name: str) -> int:
    token_id: int | None = metadata.get(id_key(name))
    if token_id is None or not 0 <= token_id < len(texts):
        problem = "missing" if token_id is None else f"{token_id} is not an id"
        raise ModelFormatError("GGUF metadata", id_key(name), problem)
    return token_id


def id_key(name: str) -> str:
    return f"tokenizer.ggml.{name}_token_id"


def types_of(metadata: Mapping[str, Any], num_tokens: int) -> list[int]:
    """Return the `TokenType` of each token."""
    key = "tokenizer.ggml.token_type"
    return list_of(metadata, key, num_tokens) if key in metadata else [TokenType.NORMAL] * num_tokens


def _split_merge(merge: str) -> tuple[str, str]:
    space = merge.find(" ", 1)  # a token may begin with a space
    if space < 0:
        raise ModelFormatError("GGUF metadata", "tokenizer.ggml.merges", f"{merge!r} is not two tokens")
    return merge[:space], merge[space + 1 :]


def list_of(metadata: Mapping[str, Any], key: str, length: int | None = None) -> list[Any]:
    if metadata.get(key) is None:
        raise ModelFormatError("GGUF metadata", key, "missing")
    items = list(metadata[key])
    if length is not None and len(items) != length:
        raise ModelFormatError("GGUF metadata", key, f"has {len(items)} items, expected {length}")
    return items
