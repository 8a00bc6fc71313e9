"""A `tokenizers` backend of a text encoder from the key-values of a GGUF file.

Two dialects: WordPiece (`bert`) and Unigram (`t5`). llama.cpp normalizes, splits and spells with its own code, which
differs for rare characters. This module combines the parts of Hugging Face's BERT and XLM-R. So a GGUF file and the
folder from which it was converted give the same ids. Keys and defaults: `llama.cpp/src/llama-vocab.cpp`. A folder's
`vocab.txt` uses the same WordPiece.
"""

import math
from collections.abc import Mapping
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from infer.errors import ModelFormatError
from infer.text.tokenizer.gguf_vocabulary import (
    TokenType,
    add_tokens,
    added_end,
    checked_id,
    id_key,
    list_of,
    make_bos_eos_processor,
    types_of,
)
from infer.text.tokenizer.tokenizers_library import check_growth, is_charsmap, panics_as, try_backend
from infer.text.tokenizer.value_checks import check_metadata

PREFIX = "##"  # of a token of WordPiece inside a word
_WORD_MARK = "▁"
_SCORED_TYPES = (TokenType.NORMAL, TokenType.BYTE)
_SPECIAL_TYPES = (TokenType.UNKNOWN, TokenType.CONTROL)
_NAMES = ("bos", "eos", "eot", "eom", "cls", "seperator", "unknown", "padding", "mask")
_DEFAULT_IDS = {
    "bert": {"bos": 101, "seperator": 102, "unknown": 100, "padding": 0, "mask": 103},
    "t5": {"eos": 1, "unknown": 2, "padding": 0},
}


def is_encoder(metadata: Mapping[str, Any]) -> bool:
    """Return True for the metadata of an encoder's tokenizer."""
    return metadata.get("tokenizer.ggml.model") in tuple(_DEFAULT_IDS)


def with_default_ids(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return an encoder's metadata with the ids of the special tokens that the file leaves out.

    Older files name BERT's first token `cls`, newer ones `bos`. The result has both.
    """
    check_metadata(metadata)
    num_tokens = len(list_of(metadata, "tokenizer.ggml.tokens"))
    ids = {name: found for name in _NAMES if (found := metadata.get(id_key(name))) is not None}
    ids = {name: default for name, default in _DEFAULT_IDS[_model(metadata)].items() if default < num_tokens} | ids
    if _model(metadata) == "bert":
        ids |= {name: ids["cls"] if "cls" in ids else ids.get("bos") for name in ("cls", "bos")}
    return {**metadata, **{id_key(name): token_id for name, token_id in ids.items()}}


def make_encoder_backend(metadata: Mapping[str, Any]) -> tuple[Tokenizer, list[str]]:
    """Return the backend and the token texts for metadata of `with_default_ids`.

    Raises ModelFormatError for contradictory metadata.
    """
    texts = list_of(metadata, "tokenizer.ggml.tokens")
    named = {metadata.get(id_key(name)) for name in _NAMES}
    types = [
        TokenType.CONTROL if token_id in named else kind for token_id, kind in enumerate(types_of(metadata, len(texts)))
    ]
    if _model(metadata) == "bert":
        texts = [_restored(text, kind) for text, kind in zip(texts, types, strict=True)]
    with panics_as(lambda problem: ModelFormatError("GGUF metadata", "tokenizer", problem)):
        make = _make_wordpiece if _model(metadata) == "bert" else _make_unigram
        backend = make(metadata, texts, types)
        check_growth("GGUF metadata", backend)
        try_backend(backend)
    return backend, texts


def _make_wordpiece(metadata: Mapping[str, Any], texts: list[str], types: list[int]) -> Tokenizer:
    own_names = {"cls_token": "cls", "sep_token": "seperator", "unk_token": "unknown"}
    names = {name: texts[checked_id(metadata, texts, own)] for name, own in own_names.items()}
    # Converters write no key for it. The vocabulary of an uncased model has no capital letters except single ones.
    words = (text for text, kind in zip(texts, types, strict=True) if kind == TokenType.NORMAL)
    is_cased = any(len(word) > 1 and word.isascii() and word.isalpha() and not word.islower() for word in words)
    backend = make_wordpiece(
        {text: token_id for token_id, text in enumerate(texts)},
        names,
        lowercase=metadata.get("tokenizer.ggml.normalizer.lowercase", not is_cased),
        strip_accents=metadata.get("tokenizer.ggml.normalizer.strip_accents"),
    )
    add_tokens(backend, texts, types)
    return backend


def make_wordpiece(
    vocabulary: dict[str, int],
    names: Mapping[str, str],
    *,
    lowercase: bool,
    strip_accents: bool | None,
    splits_chinese: bool = True,
) -> Tokenizer:
    """Return the backend, in which only `names` are special. The default of `strip_accents` is `lowercase`."""
    backend = Tokenizer(models.WordPiece(vocabulary, unk_token=names["unk_token"], continuing_subword_prefix=PREFIX))
    backend.normalizer = normalizers.BertNormalizer(
        clean_text=True, handle_chinese_chars=splits_chinese, strip_accents=strip_accents, lowercase=lowercase
    )
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece(prefix=PREFIX)
    backend.add_special_tokens([text for text in names.values() if text in vocabulary])
    backend.post_processor = make_bos_eos_processor(backend, names["cls_token"], names["sep_token"], num_separators=1)
    return backend


def _restored(text: str, kind: int) -> str:
    """Return the token as in BERT's vocabulary. In a GGUF file ▁ begins words, and other parts have no mark.

    Older converters leave all names in brackets unchanged.
    """
    if kind in _SPECIAL_TYPES or (len(text) > 2 and text[0] == "[" and text[-1] == "]"):
        return text
    return text.removeprefix(_WORD_MARK) if text.startswith(_WORD_MARK) else PREFIX + text


def _make_unigram(metadata: Mapping[str, Any], texts: list[str], types: list[int]) -> Tokenizer:
    scores = list_of(metadata, "tokenizer.ggml.scores", len(texts))
    if not all(map(math.isfinite, scores)):
        raise ModelFormatError("GGUF metadata", "tokenizer.ggml.scores", "expected finite numbers")
    unknown_id = checked_id(metadata, texts, "unknown")
    # The worst score decides about unknown characters, and converters invent a score for rows without a token. A space
    # prevents the names of such rows from being spelled.
    pieces = [
        (f" {text}" if kind == TokenType.UNUSED else text, float(score) if kind in _SCORED_TYPES else 0.0)
        for text, kind, score in zip(texts, types, scores, strict=True)
    ]
    backend = Tokenizer(models.Unigram(pieces, unknown_id, TokenType.BYTE in types))
    _cut_as_sentencepiece(backend, metadata)
    add_tokens(backend, texts, types)
    ends = [added_end(metadata, texts, name, default=default) for name, default in (("bos", False), ("eos", True))]
    is_doubled = metadata.get("tokenizer.ggml.add_sep_token", ends[0] is not None)
    backend.post_processor = make_bos_eos_processor(backend, *ends, num_separators=2 if is_doubled else 1)
    return backend


def _cut_as_sentencepiece(backend: Tokenizer, metadata: Mapping[str, Any]) -> None:
    """Give the backend the normalizer, pre-tokenizer and decoder of SentencePiece's settings."""
    steps: list[normalizers.Normalizer] = []
    if numbers := metadata.get("tokenizer.ggml.precompiled_charsmap"):
        charsmap = bytes(number & 255 for number in numbers)  # the items may be signed
        if not is_charsmap(charsmap):
            key = "tokenizer.ggml.precompiled_charsmap"
            raise ModelFormatError("GGUF metadata", key, "is not a map of characters")
        steps.append(normalizers.Precompiled(charsmap))
    adds_prefix = metadata.get("tokenizer.ggml.add_space_prefix", False)
    scheme = "always" if adds_prefix else "never"
    cuts: list[pre_tokenizers.PreTokenizer] = [pre_tokenizers.Metaspace(_WORD_MARK, scheme)]
    if metadata.get("tokenizer.ggml.remove_extra_whitespaces", False):
        if adds_prefix:  # each word gets the prefix, as XLM-R and T5 define it
            cuts = [pre_tokenizers.WhitespaceSplit(), *cuts]
        else:
            steps += [normalizers.Strip(), normalizers.Replace(Regex(" {2,}"), " ")]
    backend.normalizer = normalizers.Sequence(steps)
    backend.pre_tokenizer = pre_tokenizers.Sequence(cuts)
    backend.decoder = decoders.Metaspace(_WORD_MARK, scheme)


def _model(metadata: Mapping[str, Any]) -> str:
    return str(metadata["tokenizer.ggml.model"])
