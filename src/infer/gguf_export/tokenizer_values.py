"""A folder's tokenizer → `tokenizer.*` of a GGUF file: the inverse of `tokenizer.gguf_vocabulary`.

The result is read again, and a text in many languages must get the same ids. So a tokenizer is written exactly or
refused.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from tokenizers import Tokenizer
from tokenizers.models import BPE

from infer.errors import UnsupportedModelError
from infer.gguf_export.merge_scores import merges_of, scores_of
from infer.gguf_export.pre_tokenizer_names import pre_tokenizer_name
from infer.gguf_export.values import Value
from infer.tokenizer.gguf_vocabulary import TokenType
from infer.tokenizer.tokenizer_files import TokenizerParts, read_folder, read_gguf

_ID_NAMES = {
    "bos_token": "bos",
    "eos_token": "eos",
    "unk_token": "unknown",
    "sep_token": "seperator",
    "pad_token": "padding",
    "mask_token": "mask",
}
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


def tokenizer_values(path: Path, architecture: str, vocab_size: int) -> dict[str, Value]:
    """Return the keys of a folder's tokenizer and chat templates.

    Args:
        path: The folder.
        architecture: The architecture's name in GGUF.
        vocab_size: Number of rows of the embedding. Rows without a token get the name of an unused one.

    Raises:
        UnsupportedModelError: GGUF has no form for the tokenizer. The error names what it lacks.
        ModelError: The folder's files cannot be read.
    """
    parts = read_folder(path)
    texts, types = _tokens(parts.backend, vocab_size)
    values = _vocabulary(path, architecture, parts.backend, texts, types)
    values |= _special_ids(parts) | _templates(parts.chat_templates)
    again = read_gguf(values).backend
    _check_merges(path, parts.backend, again)
    _check_ids(path, parts, again)
    return values


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


def _vocabulary(
    path: Path, architecture: str, backend: Tokenizer, texts: list[str], types: list[int]
) -> dict[str, Value]:
    """Return the tokens, and what the tokenizer's algorithm needs besides."""
    model = backend.model
    kinds = [] if isinstance(model, BPE) else [type(model).__name__]
    kinds += [name for name in _NOT_IN_GGUF if getattr(model, name, None)]
    if not isinstance(model, BPE) or kinds:
        problem = f"GGUF has no form for the tokenizer of {architecture}: {', '.join(kinds)}"
        raise UnsupportedModelError(f"{path.name}: {problem}")
    merges = merges_of(model)
    if model.byte_fallback:
        return _marked_vocabulary(path, architecture, backend, texts, types, merges)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre_tokenizer_name(path, architecture, backend),
        "tokenizer.ggml.tokens": texts,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": _joined(path, merges),
    }


def _marked_vocabulary(
    path: Path,
    architecture: str,
    backend: Tokenizer,
    texts: list[str],
    types: list[int],
    merges: Sequence[tuple[str, str]],
) -> dict[str, Value]:
    """Return the same for SentencePiece's form, which marks spaces and has a token for each byte.

    User-defined tokens are written with their spaces in the clear.
    """
    types = [
        TokenType.BYTE.value if kind == TokenType.NORMAL and _BYTE.fullmatch(text) else kind
        for text, kind in zip(texts, types, strict=True)
    ]
    own: dict[str, Value] = {"tokenizer.ggml.model": "llama", "tokenizer.ggml.pre": "default"}
    if architecture == "gemma4":
        own = {"tokenizer.ggml.model": "gemma4", "tokenizer.ggml.merges": _joined(path, merges)}
    return own | {
        "tokenizer.ggml.tokens": [
            text.replace(_SPACE_MARK, " ") if kind == TokenType.USER_DEFINED else text
            for text, kind in zip(texts, types, strict=True)
        ],
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.scores": scores_of(texts, types, merges),
        "tokenizer.ggml.add_space_prefix": backend.encode("a", add_special_tokens=False).tokens[0][0] == _SPACE_MARK,
    }


def _joined(path: Path, merges: Sequence[tuple[str, str]]) -> list[str]:
    for left, right in merges:
        if " " in left[1:] or " " in right:
            raise UnsupportedModelError(f"{path.name}: the merge {left!r:.40} + {right!r:.40} has no form in GGUF")
    return [" ".join(merge) for merge in merges]


def _special_ids(parts: TokenizerParts) -> dict[str, Value]:
    """Return the ids of special tokens, and those that are added to a text."""
    backend = parts.backend
    named = {_ID_NAMES[name]: text for name, text in parts.named_tokens.items() if name in _ID_NAMES}
    found = {own: token_id for own, text in named.items() if (token_id := backend.token_to_id(text)) is not None}
    plain, whole = (backend.encode("a", add_special_tokens=added).ids for added in (False, True))
    first = next((at for at in range(len(whole)) if whole[at : at + len(plain)] == plain), 0)
    before, after = whole[:first], whole[first + len(plain) :]
    ends = [*([found["eos"]] if after and "eos" in found else []), *parts.end_token_ids]
    if before:
        found["bos"] = before[0]
    if after:
        found["eos"] = after[-1]
    others = dict.fromkeys(token_id for token_id in ends if token_id != found.get("eos"))
    found |= dict(zip(("eot", "eom"), others, strict=False))
    values: dict[str, Value] = {f"tokenizer.ggml.{name}_token_id": token_id for name, token_id in found.items()}
    return values | {"tokenizer.ggml.add_bos_token": bool(before), "tokenizer.ggml.add_eos_token": bool(after)}


def _templates(templates: Mapping[str, str]) -> dict[str, Value]:
    own: dict[str, Value] = {
        "tokenizer.chat_template" + ("" if name == "default" else f".{name}"): text for name, text in templates.items()
    }
    others = [name for name in templates if name != "default"]
    return own | {"tokenizer.chat_templates": others} if others else own


def _check_merges(path: Path, backend: Tokenizer, again: Tokenizer) -> None:
    """Raise UnsupportedModelError if the scores of SentencePiece do not stand for the tokenizer's merges.

    Merges that make the same token may have another order, and those that make an added token are never used.
    """
    added = {token.content for token in backend.get_added_tokens_decoder().values()}
    merges = (merges_of(each.model) for each in (backend, again))
    own, read = ([pair for pair in each if "".join(pair) not in added] for each in merges)
    if set(own) != set(read) or list(dict.fromkeys(map("".join, own))) != list(dict.fromkeys(map("".join, read))):
        other = next(iter(set(own) ^ set(read)), own[0])
        raise UnsupportedModelError(
            f"{path.name}: the merges of its tokenizer cannot be written as SentencePiece's scores: {other!r:.80}"
        )


def _check_ids(path: Path, parts: TokenizerParts, again: Tokenizer) -> None:
    """Raise UnsupportedModelError if the tokenizer that a reader makes finds other ids in a text."""
    added = parts.backend.get_added_tokens_decoder().values()
    plain = [token.content for token in added if not (token.lstrip or token.rstrip or token.single_word)]
    turns = "".join(f"{content}a b" for content in (*plain[:20], *plain[-20:]))
    for text in (*_TEXTS, turns):
        for is_whole in (False, True):
            own, read = (backend.encode(text, add_special_tokens=is_whole) for backend in (parts.backend, again))
            if own.ids != read.ids:
                at = next((i for i, pair in enumerate(zip(own.ids, read.ids, strict=False)) if pair[0] != pair[1]), 0)
                raise UnsupportedModelError(
                    f"{path.name}: GGUF has no form for its tokenizer: from {own.tokens[at : at + 3]!r:.80} on, the "
                    f"same text would be read as {read.tokens[at : at + 3]!r:.80}"
                )
