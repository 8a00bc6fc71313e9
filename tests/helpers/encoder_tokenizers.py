"""Small vocabularies of BERT's and XLM-R's kind, as folders of `transformers` and as GGUF metadata."""

import base64
import json
import struct
from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer as Backend
from tokenizers import normalizers, pre_tokenizers
from transformers import BertTokenizer, XLMRobertaTokenizer

from infer.text.tokenizer.gguf_vocabulary import TokenType

SENTENCES = [
    "The quick brown fox doesn't jump over the lazy dog; it's been 12,345 days!",
    "He said: 'I'm here', she's there, we've won, they're late. do not don't",
    "Ärger über größere Häuser in São Paulo, l'été à Besançon, naïve façade.",
    "Быстрая коричневая лиса прыгает через ленивую собаку.",
    "Η γρήγορη καφέ αλεπού πηδάει πάνω από το τεμπέλικο σκυλί.",
    "敏捷的棕色狐狸跳过了懒狗。東京タワーはとても高いです。한국어 문장입니다.",
    "الثعلب البني السريع يقفز فوق الكلب الكسول. שלום עולם. नमस्ते दुनिया",
    "def f(x): return x + 1  # https://example.org/path?query=1",
]
BERT_NAMES = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
XLMR_NAMES = ("<s>", "<pad>", "</s>", "<unk>")
# Texts that the decoder replaces, and similar words that it must not change.
_WORDS = ["n't", "'m", "'s", "'ve", "'re", "...", "?!", "'", "\u0301"]
# Pieces whose single characters are unknown. If the worst score is -12, "Þð🙂" is "Þð" and an unknown token.
_RARE_PIECES = [("🙂🙃🙂", -3.0), ("Þ", -12.0), ("ð🙂", -12.0), ("Þð", -1.0)]
_CHARSMAP = {
    "\t": " ", "\n": " ", "\r": " ", "\u3000": " ", "\xa0": " ", "\u200b": " ", "Ａ": "A", "ﬁ": "fi", "½": "1⁄2",
    "e\u0301": "é", "ﷺ": "صلى الله عليه وسلم", "\x7f": "",
}  # fmt: skip


def make_bert_folder(folder: Path, *, lowercase: bool = True, **settings: Any) -> Any:
    """Save a tokenizer with sentence-transformers' truncation and padding, and return that of `transformers`."""
    normalizer, cutter = normalizers.BertNormalizer(lowercase=lowercase), pre_tokenizers.BertPreTokenizer()
    cut = [cutter.pre_tokenize_str(normalizer.normalize_str(sentence)) for sentence in SENTENCES]
    words = [word for found in cut for word, _ in found]
    characters = sorted(set("".join(words)))
    halves = [half for word in words for half in (word[: len(word) // 2 + 1], "##" + word[len(word) // 2 + 1 :])]
    marked = ["##" + character for character in characters]
    pieces = [*BERT_NAMES, *characters, *marked, *halves, *words[::2], *_WORDS, "K"]
    known = dict.fromkeys(piece for piece in [*pieces, "[unused1]"] if piece != "##")
    vocabulary = {piece: token_id for token_id, piece in enumerate(known)}
    tokenizer = BertTokenizer(vocab=vocabulary, do_lower_case=lowercase, **settings)
    tokenizer.save_pretrained(folder)
    _truncate_and_pad(folder, "[PAD]", vocabulary["[PAD]"])
    return tokenizer


def make_xlmr_folder(folder: Path) -> Any:
    """Save a tokenizer as `make_bert_folder` does. Scores are float32, as SentencePiece's are."""
    words = ["▁" + word for sentence in SENTENCES for word in sentence.split()]
    parts = [
        word[at:end] for word in words for at in range(len(word)) for end in range(at + 1, min(at + 6, len(word) + 1))
    ]
    scores = {part: float(np.float32(np.log(count / len(parts)))) for part, count in Counter(parts).items()}
    vocabulary = [*((name, 0.0) for name in XLMR_NAMES), *scores.items(), *_RARE_PIECES, ("<mask>", 0.0)]
    tokenizer = XLMRobertaTokenizer(vocab=vocabulary, _spm_precompiled_charsmap=make_charsmap(_CHARSMAP))
    tokenizer.save_pretrained(folder)
    _truncate_and_pad(folder, "<pad>", 1)
    return tokenizer


def _truncate_and_pad(folder: Path, pad_token: str, pad_id: int) -> None:
    path = folder / "tokenizer.json"
    backend = Backend.from_file(str(path))
    backend.enable_truncation(6)
    backend.enable_padding(length=12, pad_id=pad_id, pad_token=pad_token)
    backend.save(str(path))


def make_charsmap(replacements: Mapping[str, str]) -> bytes:
    """Return SentencePiece's map of characters: a trie of Darts, whose nodes have 256 places each, and the texts."""
    texts = b"".join(text.encode() + b"\0" for text in replacements.values())
    ends = dict(
        zip(replacements, chain([0], np.cumsum([len(t.encode()) + 1 for t in replacements.values()])), strict=False)
    )
    prefixes = sorted({key.encode()[:length] for key in replacements for length in range(len(key.encode()) + 1)})
    block = {prefix: 256 * number for number, prefix in enumerate(prefixes, 1)}
    units = np.zeros(256 * (len(prefixes) + 1), dtype=np.uint32)
    place = {b"": 0} | {prefix: block[prefix[:-1]] + prefix[-1] for prefix in prefixes if prefix}
    for prefix in prefixes:
        label = prefix[-1] if prefix else 0
        units[place[prefix]] = (place[prefix] ^ block[prefix]) << 10 | label
    for key, end in ends.items():
        units[place[key.encode()]] |= 1 << 8
        units[block[key.encode()]] = int(end) | 1 << 31
    return struct.pack("<I", units.nbytes) + units.tobytes() + texts


def as_bert_gguf(folder: Path, **changes: Any) -> dict[str, Any]:
    """Return the metadata that llama.cpp's converter writes: words begin with ▁, other parts have no mark."""
    saved = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    ids = saved["model"]["vocab"]
    text_by_id = {token_id: text for text, token_id in ids.items()}
    texts = [text_by_id.get(token_id, f"[PAD{token_id}]") for token_id in range(max(text_by_id) + 1)]
    special = {token["content"] for token in saved["added_tokens"]}
    tokens = [text if text in special else text[2:] if text.startswith("##") else "▁" + text for text in texts]
    kinds = {text: TokenType.CONTROL if text in special else TokenType.NORMAL for text in ids}
    types = [kinds.get(text, TokenType.UNUSED) for text in texts]
    named = {"bos": "[CLS]", "seperator": "[SEP]", "eos": "[SEP]", "unknown": "[UNK]", "padding": "[PAD]"}
    named |= {"mask": "[MASK]"}
    return _metadata("bert", tokens, types, {name: ids[text] for name, text in named.items()}, changes)


def as_xlmr_gguf(folder: Path, **changes: Any) -> dict[str, Any]:
    """Return the metadata that llama.cpp's converter writes, with a row at the end that has no token."""
    saved = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    tokens = [*(text for text, _ in saved["model"]["vocab"]), "[PAD9]"]
    scores = [*(score for _, score in saved["model"]["vocab"]), -10000.0]
    special = {token["content"] for token in saved["added_tokens"]} - {"<unk>"}
    types = [TokenType.CONTROL if text in special else TokenType.NORMAL for text in tokens]
    types[3], types[-1] = TokenType.UNKNOWN, TokenType.UNUSED
    charsmap = base64.b64decode(saved["normalizer"]["precompiled_charsmap"])
    settings = {"scores": scores, "precompiled_charsmap": list(charsmap), "add_space_prefix": True}
    settings |= {"remove_extra_whitespaces": True, "add_bos_token": True, "add_eos_token": True}
    named = {"bos": 0, "padding": 1, "eos": 2, "seperator": 2, "unknown": 3, "cls": 0, "mask": len(tokens) - 2}
    return _metadata("t5", tokens, types, named, settings | changes)


def _metadata(
    model: str, tokens: list[str], types: Iterable[int], ids: Mapping[str, int], changes: Mapping[str, Any]
) -> dict[str, Any]:
    named = {f"{name}_token_id": token_id for name, token_id in ids.items()}
    settings = {"model": model, "pre": "default", "tokens": tokens, "token_type": [int(kind) for kind in types]}
    found = {f"tokenizer.ggml.{name}": value for name, value in (settings | named | dict(changes)).items()}
    return {key: value for key, value in found.items() if value is not None}
