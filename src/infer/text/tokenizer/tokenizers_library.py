"""The `tokenizers` library, protected from files that break it.

It is written in Rust. On unexpected input it panics, which Python sees as a BaseException, or it crashes the process.
So inputs that are known to do this are refused before the library sees them. Everything else is tried immediately, and
a remaining panic becomes an ordinary error. A file's steps of encoding and decoding may not let a text grow without
limit, so that no file exhausts the memory.
"""

import base64
import binascii
import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple, final

import tokenizers
from tokenizers.models import Model, Unigram
from tokenizers.normalizers import Lowercase, Sequence

from infer.errors import InferError, InvalidRequestError, ModelFormatError
from infer.system.json_limits import parse_json, read_whole

MAX_BYTES = 128 << 20
_OF_TOKENIZERS = {Exception, ValueError}  # the classes that tokenizers raises
MAX_TOKENS = 1_000_000  # the largest known vocabulary has 262,144

MAX_SHORT = 2_000  # characters of a short text

_PANIC = "PanicException"  # pyo3 exports no name for it
# The library cuts characters off each merge of BPE for a prefix, inside a character or past the end of a shorter merge.
_PREFIX = re.compile(rb'"continuing_subword_prefix"\s*:\s*(?!null|""|\s)')
_CHARSMAP = re.compile(rb'"precompiled_charsmap"\s*:\s*(?:"([^"]*)")?')
_ESCAPED_LETTER = re.compile(rb"\\u00(?:[46][1-9a-f]|[57][0-9a]|5f)", re.IGNORECASE)
_LISTS = ("normalizers", "pretokenizers", "processors", "decoders")
_TRIED = ("", "a", " Hello,  wörld 12\n", "世界 \u0301\U0001f642\0")


def load_backend(path: Path) -> tokenizers.Tokenizer:
    """Return the backend of a tokenizer.json.

    Raises ModelFormatError if the library refuses the file or cannot work with it.
    """
    content = read_whole(path, MAX_BYTES)
    _check_for_traps(path, content)
    with panics_as(lambda problem: ModelFormatError(path, "tokenizer", problem)):
        backend = tokenizers.Tokenizer.from_buffer(content)
        backend.no_truncation()
        backend.no_padding()
        _check_steps(path, backend)
        check_growth(path, backend)
        try_backend(backend)
    return backend


def steps_of(part: Any) -> list[dict[str, Any]]:
    """Return the steps of a part, such as a normalizer, in their order, with those of sequences. None has no steps."""
    return [] if part is None else _flat(json.loads(part.__getstate__()))


def _flat(step: dict[str, Any]) -> list[dict[str, Any]]:
    if step["type"] != "Sequence":
        return [step]
    return [each for name in _LISTS for inner in step.get(name, ()) for each in _flat(inner)]


def ids_around(backend: tokenizers.Tokenizer) -> tuple[list[int], list[int], list[int]]:
    """Return the ids that a backend adds before a text, the ids of a short text, and those that it adds after it."""
    text, whole = (list(backend.encode("a", add_special_tokens=added).ids) for added in (False, True))
    first = next((at for at in range(len(whole)) if whole[at : at + len(text)] == text), 0)
    return whole[:first], text, whole[first + len(text) :]


def lowercase(backend: tokenizers.Tokenizer) -> None:
    """Let a backend read all texts in lower case, as sentence-transformers does if its files say so."""
    if (own := backend.normalizer) is None or own.normalize_str("A") != "a":
        backend.normalizer = Sequence([Lowercase(), *filter(None, [own])])


def try_backend(backend: tokenizers.Tokenizer) -> None:
    """Encode some texts, on which the library fails if the parts of the backend do not fit each other."""
    for text in _TRIED:
        backend.encode(text)


def encode(backend: tokenizers.Tokenizer, text: str, add_special_tokens: bool) -> list[int]:
    """Return the ids of a text. Raises InvalidRequestError if the text is wrong or the library fails.

    `encode` holds the GIL, and `encode_batch_fast` does not. A fork after `encode_batch_fast` warns on stderr, so short
    texts, which take about a millisecond, use `encode`.
    """
    check_encodable(text)
    with panics_as(lambda problem: InvalidRequestError(f"the tokenizer fails on the text: {problem}")):
        if len(text) <= MAX_SHORT:
            return list(backend.encode(text, add_special_tokens=add_special_tokens).ids)
        return list(backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids)


def make_text_backend(backend: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """Return a backend with the same model, for which special tokens in a text are ordinary text."""
    added = backend.get_added_tokens_decoder()
    names = {token_id: token.content for token_id, token in added.items()}
    model = backend.model
    if isinstance(model, Unigram):
        # A text after a space is in no other text, because spaces become ▁ before Unigram.
        names |= {token_id: f" \U0010ffff{token.content}" for token_id, token in added.items() if token.special}
        model = _renamed(model, names)
    twin = _twin(backend, model, {token_id: _with_text(added[token_id], names[token_id]) for token_id in added})
    twin.encode_special_tokens = True
    return twin


def without_ids_from(num_rows: int, path: Path, backend: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """Return a backend without the added tokens whose ids have no row in the embedding. Their texts become plain text.

    Raises ModelFormatError if the backend adds such a token to every text.
    """
    added = backend.get_added_tokens_decoder()
    kept = {token_id: token for token_id, token in added.items() if token_id < num_rows}
    if len(kept) == len(added):
        return backend
    twin = _twin(backend, backend.model, kept)
    twin.decoder = backend.decoder
    for token_id in added.keys() & set(twin.encode("").ids) - kept.keys():
        raise ModelFormatError(path, "post_processor", f"adds token {token_id}, but the embedding has {num_rows} rows")
    return twin


def _twin(
    backend: tokenizers.Tokenizer, model: Model, added: Mapping[int, tokenizers.AddedToken]
) -> tokenizers.Tokenizer:
    """Return a backend that encodes with the same steps, another model and other added tokens."""
    twin = tokenizers.Tokenizer(model)
    for name in ("normalizer", "pre_tokenizer", "post_processor"):
        if (part := getattr(backend, name)) is not None:
            setattr(twin, name, part)
    twin.add_tokens([added[token_id] for token_id in sorted(added)])
    found = {token_id: token.content for token_id, token in twin.get_added_tokens_decoder().items()}
    if found != {token_id: token.content for token_id, token in added.items()}:
        raise RuntimeError("the tokenizers library gave the added tokens other ids")
    return twin


def _with_text(token: tokenizers.AddedToken, text: str) -> tokenizers.AddedToken:
    options = {name: getattr(token, name) for name in ("single_word", "lstrip", "rstrip", "normalized", "special")}
    return tokenizers.AddedToken(text, **options)


def _renamed(model: Unigram, names: Mapping[int, str]) -> Unigram:
    """Return the model with other texts for some tokens. Unigram spells a text with any token, even control tokens."""
    state = json.loads(model.__getstate__())
    vocabulary = [(names.get(token_id, text), score) for token_id, (text, score) in enumerate(state["vocab"])]
    return Unigram(vocabulary, state["unk_id"], state["byte_fallback"])


def read_vocabulary(backend: tokenizers.Tokenizer) -> dict[str, int]:
    """Return the ids by text, including added tokens.

    Raises ModelFormatError for a duplicate id, or for an id far outside any vocabulary.
    """
    ids: dict[str, int] = backend.get_vocab(with_added_tokens=True)
    if len(set(ids.values())) < len(ids):
        raise ModelFormatError("tokenizer.json", "vocab", "two tokens have the same id")
    largest = max(ids.values(), default=0)
    if largest >= MAX_TOKENS:
        raise ModelFormatError("tokenizer.json", "vocab", f"expected ids below {MAX_TOKENS}, got {largest}")
    return ids


def check_encodable(text: str) -> None:
    """Raise InvalidRequestError for a lone surrogate."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InvalidRequestError(
            f"the text contains a lone surrogate U+{ord(text[error.start]):04X} at character {error.start}, "
            "which is not Unicode text: decode it with errors='replace'"
        ) from None


@contextmanager
def panics_as(make_error: Callable[[str], InferError]) -> Iterator[None]:
    try:
        yield
    except InferError:
        raise
    except Exception as error:
        if type(error) not in _OF_TOKENIZERS:  # for example an exception of a signal's handler
            raise
        raise make_error(_one_line(error)) from error
    except BaseException as error:
        if type(error).__name__ != _PANIC:
            raise
        raise make_error(f"the tokenizers library failed: {_one_line(error)}") from None


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300]


def _check_for_traps(path: Path, content: bytes) -> None:
    if _ESCAPED_LETTER.search(content):  # an escape could hide a name
        try:
            content = json.dumps(json.loads(content), ensure_ascii=False).encode("utf-8", "surrogatepass")
        except (ValueError, RecursionError) as error:
            raise ModelFormatError(path, "JSON", _one_line(error)) from error
    if _PREFIX.search(content) and not _is_wordpiece(path, content):
        raise ModelFormatError(path, "continuing_subword_prefix", "is not supported: expected null")
    for found in _CHARSMAP.finditer(content):
        if found[1] is None or not _is_coded_charsmap(found[1].replace(rb"\/", b"/")):
            raise ModelFormatError(path, "precompiled_charsmap", "is not a map of characters", found.start())


def _is_wordpiece(path: Path, content: bytes) -> bool:
    """Return True if a file's model says that it is WordPiece, which removes no prefixes. No key appears twice."""
    model = parse_json(path, content).get("model")
    return isinstance(model, dict) and model.get("type") == "WordPiece"


def _is_coded_charsmap(text: bytes) -> bool:
    try:
        return is_charsmap(base64.b64decode(text, validate=True))
    except binascii.Error:
        return False


def is_charsmap(content: bytes) -> bool:
    """Return True if the content is four bytes with the length of a trie, the trie, and text."""
    trie_bytes = int.from_bytes(content[:4], "little")
    return 4 <= trie_bytes <= len(content) - 4 and trie_bytes % 4 == 0


def _check_steps(path: Path, backend: tokenizers.Tokenizer) -> None:
    for name in ("normalizer", "post_processor"):
        for step in steps_of(getattr(backend, name)):
            if problem := _problem(step):
                raise ModelFormatError(path, name, problem)


def _problem(step: Mapping[str, Any]) -> str | None:
    """Return the problem of a step that the library accepts and later fails on, or None."""
    match step:
        case {"type": "Prepend", "prepend": ""}:
            return "Prepend has nothing to prepend"
        case {"type": "Replace", "pattern": {"String": ""}}:
            return "Replace has an empty pattern"
        case {"type": "TemplateProcessing", "single": list(single), "special_tokens": dict(known)}:
            if any(piece.get("Sequence", {}).get("id", "A") != "A" for piece in single):
                return "the template for one text contains a second text"
            for piece in (*single, *(step.get("pair") or ())):
                if "SpecialToken" in piece and piece["SpecialToken"]["id"] not in known:
                    return f"the template names {piece['SpecialToken']['id']!r:.80}, which special_tokens does not have"
    return None


MAX_GROWTH: Final = 100  # published files reach 72
_MAX_STEPS: Final = 64
_OF_UNICODE: Final = 18  # characters of U+FDFA's compatibility form, the longest
# Unicode's own forms of characters. They count once, and again only after a step of the file.
_FORMS = ("NFC", "NFD", "NFKC", "NFKD", "Nmt", "Lowercase", "BertNormalizer", "Precompiled", "ByteLevel")


def check_growth(path: Path | str, backend: tokenizers.Tokenizer) -> None:
    """Raise ModelFormatError if a text may grow more than `MAX_GROWTH` times, or if there are too many steps."""
    growth = _growth(path, backend, ("normalizer", "pre_tokenizer", "post_processor"))
    for name, factor in (("steps before the model", growth), ("decoder", _growth(path, backend, ("decoder",)))):
        if factor > MAX_GROWTH:
            problem = f"make a text up to {factor:.3g} times as long: at most {MAX_GROWTH} times is supported"
            raise ModelFormatError(path, name, problem)


def _growth(path: Path | str, backend: tokenizers.Tokenizer, names: tuple[str, ...]) -> float:
    steps = [step for name in names for step in steps_of(getattr(backend, name))]
    if len(steps) > _MAX_STEPS:
        raise ModelFormatError(path, "/".join(names), f"has {len(steps)} steps: at most {_MAX_STEPS} are supported")
    growth, has_form, is_rewritten = 1.0, False, False
    for step in steps:
        if step["type"] in _FORMS:
            growth *= _form_factor(step, is_first=not has_form, is_rewritten=is_rewritten)
            has_form = True
        else:
            growth *= _own_factor(step)
        written = step.get("content") or step.get("prepend") or ""
        is_rewritten |= has_form and (step["type"] == "Precompiled" or not written.isascii())
    return growth


def _form_factor(step: Mapping[str, Any], *, is_first: bool, is_rewritten: bool) -> int:
    """Return the growth by a form of characters, which is 1 for the first one, because that is a constant of Unicode.

    A later one finds nothing to write longer, unless a step of the file has written other characters in between.
    """
    longest = _OF_UNICODE if is_rewritten else 1
    if step["type"] == "Precompiled":
        charsmap = base64.b64decode(step["precompiled_charsmap"])
        texts = charsmap[4 + int.from_bytes(charsmap[:4], "little") :].decode("utf-8", "replace").split("\0")
        longest = max(map(len, texts))
    elif step["type"] == "ByteLevel":
        longest = 2
    return 1 if is_first and longest <= _OF_UNICODE else longest


def _own_factor(step: Mapping[str, Any]) -> int:
    match step:
        case {"type": "Replace", "pattern": {"String": str(pattern)}, "content": str(content)}:
            return max(1, -(-len(content) // max(1, len(pattern))))
        case {"type": "Replace", "content": str(content)}:  # the pattern may match between any two characters
            return 1 + len(content)
        case {"type": "Prepend", "prepend": str(text)}:
            return 1 + len(text)
        case {"type": "TemplateProcessing", "single": list(single), "pair": list(pair)}:
            return max(1, sum("Sequence" in piece for piece in single), sum("Sequence" in piece for piece in pair) - 1)
        case {"type": "Metaspace"} if "split" in step:
            return 2
    return 1


@final
class EncodedPair(NamedTuple):
    """The ids of one or two texts, and for each id the type that the model's table of token types expects."""

    ids: list[int]
    type_ids: list[int]

    @classmethod
    def of_one(cls, ids: list[int]) -> "EncodedPair":
        """Return ids that all have the first type."""
        return cls(ids, [0] * len(ids))

    @property
    def second_start(self) -> int:
        """The index of the first token of the second type, or the number of tokens if there is none."""
        return self.type_ids.index(1) if 1 in self.type_ids else len(self.ids)


def encode_pair(backend: tokenizers.Tokenizer, first: str, second: str) -> tuple[EncodedPair, list[int]]:
    """Return the pair, and its ids that come from the texts.

    `backend` must treat special tokens in a text as ordinary text. Raises InvalidRequestError if the tokenizer has no
    form for pairs, which has a token between two texts, or if the library fails on the texts.
    """
    check_encodable(first)
    check_encodable(second)
    with panics_as(lambda problem: InvalidRequestError(f"the tokenizer fails on the texts: {problem}")):
        if not _separates(backend):
            raise InvalidRequestError(
                "the tokenizer has no form for pairs of texts: use a model that was trained on pairs"
            )
        if max(len(first), len(second)) <= MAX_SHORT:
            found = backend.encode(first, second)
        else:
            found = backend.encode_batch_fast([(first, second)])[0]
    is_added = found.special_tokens_mask
    spelled = [token_id for token_id, added in zip(found.ids, is_added, strict=True) if not added]
    return EncodedPair(list(found.ids), list(found.type_ids)), spelled


def _separates(backend: tokenizers.Tokenizer) -> bool:
    """Return True if both texts are kept, with an added token between them."""
    is_added = backend.encode("a", "a").special_tokens_mask
    num_texts = 2 * len(backend.encode("a", add_special_tokens=False).ids)
    places = [place for place, added in enumerate(is_added) if not added]
    return len(places) == num_texts > 0 and places[-1] - places[0] >= num_texts
