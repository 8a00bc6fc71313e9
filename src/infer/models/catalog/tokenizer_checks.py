"""Check a model's tokenizer against itself, its chat templates and its embedding.

The checks read the files as they are. Loading a model repairs some faults, such as the type of `<|im_end|>`, but other
programs do not.
"""

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from infer.errors import InvalidRequestError, ModelError
from infer.files import Checkpoint
from infer.system.json_limits import read_json_file
from infer.text.tokenizer import Tokenizer
from infer.text.tokenizer.gguf_encoders import is_encoder, with_default_ids
from infer.text.tokenizer.gguf_vocabulary import END_NAMES, TokenType
from infer.text.tokenizer.tokenizers_library import load_backend, read_vocabulary
from infer.text.tokenizer.value_checks import check_json, check_metadata

_QUESTION, _ANSWER = "Hello", "A short answer"
_TURN = ({"role": "user", "content": _QUESTION}, {"role": "assistant", "content": _ANSWER})
_MARKER = re.compile(r"<\|[^<>|\s]{1,64}\|?>|<[^<>|\s]{1,64}\|>|<(?:start|end)_of_[a-z_]{1,32}>|<｜[^<>\s]{1,64}｜>")
_ID_NAMES = ("bos", "eos", "eot", "eom")
_GGUF, _MAX_LISTED = "tokenizer.ggml.", 5


Kind = Literal["network", "ids", "vocabulary", "template", "converter", "not finite", "zeros", "scales", "outlier"]


@dataclass(frozen=True)
class Finding:
    """One fault of a model's files: its place, the value with the rule that it breaks, and the fix."""

    kind: Kind
    place: str  # the tensor or the key, by its name in the file
    problem: str
    fix: str
    requantise: str = ""  # the tensor that must be quantised again

    def __str__(self) -> str:
        return f"{self.place}: {self.problem}: {self.fix}"


@dataclass(frozen=True)
class StatedTokens:
    """The tokens and special ids of a model as its files state them."""

    texts: Mapping[int, str]
    control_ids: frozenset[int]
    added_ids: frozenset[int]  # found before a text is cut into words; they may be text
    named_ids: tuple[tuple[str, int], ...]  # by the key that states them
    end_ids: frozenset[int]  # that end an answer
    end_place: str  # the key that would name another one

    @property
    def ids(self) -> dict[str, int]:
        return {text: token_id for token_id, text in self.texts.items()}


def stated_tokens(checkpoint: Checkpoint) -> StatedTokens:
    """Return the tokens and special ids that the files state.

    Raises ModelError if a file of the tokenizer cannot be read.
    """
    return _stated_by_gguf(checkpoint.metadata) if checkpoint.metadata else _stated_by_folder(checkpoint)


def _stated_by_gguf(metadata: Mapping[str, Any]) -> StatedTokens:
    check_metadata(metadata)
    if is_encoder(metadata):
        metadata = with_default_ids(metadata)
    texts = metadata.get(f"{_GGUF}tokens") or []
    types = metadata.get(f"{_GGUF}token_type") or [TokenType.NORMAL] * len(texts)
    keys = [f"{_GGUF}{name}_token_id" for name in _ID_NAMES]
    named = tuple((key, metadata[key]) for key in keys if isinstance(metadata.get(key), int))
    return StatedTokens(
        dict(enumerate(texts)),
        frozenset(index for index, kind in enumerate(types) if kind in (TokenType.CONTROL, TokenType.UNKNOWN)),
        frozenset(index for index, kind in enumerate(types) if kind == TokenType.USER_DEFINED),
        named,
        frozenset(token_id for key, token_id in named if "bos" not in key),
        f"{_GGUF}eot_token_id",
    )


def _stated_by_folder(checkpoint: Checkpoint) -> StatedTokens:
    folder = checkpoint.path
    tokenizer_config = _json(checkpoint, "tokenizer_config.json")
    has_file = os.path.lexists(folder / "tokenizer.json")
    backend = load_backend(folder / "tokenizer.json") if has_file else Tokenizer.from_folder(folder).backend
    texts = {token_id: text for text, token_id in read_vocabulary(backend).items()}
    is_special = {token_id: token.special for token_id, token in backend.get_added_tokens_decoder().items()}
    for token_id, token in (tokenizer_config.get("added_tokens_decoder") or {}).items():
        if token_id.isdecimal():
            texts.setdefault(int(token_id), token["content"])
            is_special[int(token_id)] = is_special.get(int(token_id), False) or token.get("special", False)
    named = [
        (f"{file} {name}_token_id", token_id)
        for file, settings in (
            ("config.json", _json(checkpoint, "config.json")),
            ("generation_config.json", checkpoint.generation_config),
        )
        for name in ("bos", "eos")
        for token_id in _ids(settings.get(f"{name}_token_id"))
    ]
    ends = {token_id for place, token_id in named if "eos" in place}
    eos = tokenizer_config.get("eos_token")
    eos = eos.get("content") if isinstance(eos, dict) else eos
    ends |= {token_id for token_id, text in texts.items() if text == eos}
    return StatedTokens(
        texts,
        frozenset(token_id for token_id, special in is_special.items() if special),
        frozenset(token_id for token_id, special in is_special.items() if not special),
        tuple(named),
        frozenset(ends),
        "generation_config.json eos_token_id",
    )


def _json(checkpoint: Checkpoint, name: str) -> dict[str, Any]:
    path = checkpoint.path / name
    if not os.path.lexists(path):
        return {}
    settings = read_json_file(path)
    if name.startswith("tokenizer"):
        check_json(path, settings)
    return settings


def _ids(value: Any) -> list[int]:
    return [each for each in (value if isinstance(value, list) else [value]) if type(each) is int]


def id_findings(stated: StatedTokens, metadata: Mapping[str, Any], *, generates: bool) -> Iterator[Finding]:
    """Yield a finding for each special id that is outside the vocabulary, or is needed and missing."""
    for place, token_id in stated.named_ids:
        if token_id not in stated.texts:
            problem = f"{token_id} is outside the vocabulary of {len(stated.texts):,} tokens"
            yield Finding("ids", place, problem, "set it to the id of such a token, or remove it")
    if generates and not stated.end_ids:
        place = f"{_GGUF}eos_token_id" if metadata else stated.end_place
        yield Finding("ids", place, "it is missing, so no token ends an answer", "set it to the id of the last token")
    if metadata.get(f"{_GGUF}add_bos_token") and f"{_GGUF}bos_token_id" not in dict(stated.named_ids):
        problem = "it is missing, although add_bos_token is true"
        yield Finding("ids", f"{_GGUF}bos_token_id", problem, "set it to the id of the first token of a text")


def size_findings(stated: StatedTokens, num_rows: int, *, is_gguf: bool) -> Iterator[Finding]:
    """Yield a finding if the vocabulary and the rows of the embedding disagree.

    A folder may have more rows than tokens, because trainers pad them. Converters to GGUF add tokens for such rows.
    """
    num_tokens = max(stated.texts, default=-1) + 1
    place = f"{_GGUF}tokens" if is_gguf else "tokenizer.json"
    if num_tokens > num_rows:
        problem = f"{num_tokens:,} tokens, but the embedding has {num_rows:,} rows; every token must have one"
        yield Finding("vocabulary", place, problem, "take the tokenizer and the weights from the same model")
    elif is_gguf and num_tokens < num_rows:
        problem = f"{num_tokens:,} tokens, but the embedding has {num_rows:,} rows; every row must have a token"
        yield Finding("vocabulary", place, problem, "convert it again, so that unused tokens fill the vocabulary")


def converter_findings(metadata: Mapping[str, Any]) -> Iterator[Finding]:
    """Yield a finding for each known fault of converters that the metadata of a GGUF file shows.

    Sources: llama.cpp's issues 14280 (bge-m3) and 14252 with pull request 14314 (Qwen3-Embedding).
    """
    for name in ("bos", "eos"):
        key = f"{_GGUF}add_{name}_token"
        if metadata.get(f"{_GGUF}model") == "t5" and not metadata.get(key, False):
            problem = "it is not true, because an old converter wrote the file (bge-m3, llama.cpp#14280)"
            yield Finding("converter", key, problem, "convert it again: XLM-R's texts begin and end with a token")
    name = str(metadata.get("general.name", "")).lower().replace(" ", "-")
    if "qwen3-embedding" in name and not metadata.get(f"{_GGUF}add_eos_token", False):
        problem = "it is not true, because an old converter wrote the file (Qwen3-Embedding, llama.cpp#14252)"
        fix = "convert it again: a vector is the state of <|endoftext|> after the text"
        yield Finding("converter", f"{_GGUF}add_eos_token", problem, fix)


def check_templates(
    tokenizer: Tokenizer, stated: StatedTokens, *, is_gguf: bool
) -> tuple[list[Finding], frozenset[str]]:
    """Render a short conversation with each template, and compare what it writes with the tokens.

    Return the findings, and the markers that the templates write.
    """
    findings, markers = list[Finding](), set[str]()
    for name in tokenizer.chat_template_names:
        key = "tokenizer.chat_template" if is_gguf else "chat_template"
        place = key if name == "default" else f"{key}.{name}"
        try:
            prompt = tokenizer.render_chat_template([*_TURN, _TURN[0]], chat_template=name)
            turn = tokenizer.render_chat_template(_TURN, chat_template=name, add_generation_prompt=False)
        except InvalidRequestError:  # it may want tools or a system message
            findings += _broken(tokenizer, place) if name == "default" else ()
            continue
        written = dict.fromkeys(_MARKER.findall(prompt + turn))
        findings += (
            found for text in written if text not in markers for found in _marker(tokenizer, stated, place, text)
        )
        findings += _turn_end(tokenizer, stated, place, turn.rpartition(_ANSWER)[2])
        markers |= written.keys()
    return findings, frozenset(markers)


def _broken(tokenizer: Tokenizer, place: str) -> Iterator[Finding]:
    try:
        tokenizer.check_chat_template()
    except InvalidRequestError as error:
        yield Finding("template", place, str(error), "take the template of the original model")


def _marker(tokenizer: Tokenizer, stated: StatedTokens, place: str, text: str) -> Iterator[Finding]:
    """Yield a finding if a marker of the template is not one control token.

    Markers that do not end an answer may be user-defined: Gemma 4's calls are text too.
    """
    token_id = stated.ids.get(text)
    if token_id is None:
        count = len(tokenizer.encode(text, add_special_tokens=False))
        problem = f"it writes {text!r}, which is {count} tokens; a marker must be one control token"
        yield Finding("template", place, problem, "take the original model's tokenizer, if it has the marker")
    elif token_id not in stated.control_ids and (token_id not in stated.added_ids or text in END_NAMES):
        kind = "user-defined" if token_id in stated.added_ids else "plain text"
        problem = f"it writes {text!r}, whose token {token_id} is {kind}; a marker must be one control token"
        yield Finding("template", place, problem, "make it a control token")


def _turn_end(tokenizer: Tokenizer, stated: StatedTokens, place: str, tail: str) -> Iterator[Finding]:
    """Yield a finding if the special tokens that the template writes after an answer are none of those that end one."""
    written = sorted(tokenizer.special_ids_in([tail]).items(), key=lambda item: tail.find(item[0]))
    end_ids = stated.end_ids & stated.texts.keys()
    if written and end_ids and not end_ids.intersection(token_id for _, token_id in written):
        text, token_id = written[0]
        ends = ", ".join(map(str, sorted(end_ids)[:_MAX_LISTED]))
        problem = f"it ends a turn with {text!r} ({token_id}), but the ids that end an answer are {ends}"
        yield Finding("template", place, problem, f"add {token_id} as {stated.end_place}")


def make_tokenizer(checkpoint: Checkpoint) -> Tokenizer | Finding:
    """Return the tokenizer, or the finding that it cannot be made."""
    try:
        if checkpoint.metadata:
            return Tokenizer.from_gguf(checkpoint.metadata)
        return Tokenizer.from_folder(checkpoint.path)
    except ModelError as error:
        return Finding("vocabulary", "tokenizer", str(error), "take the tokenizer of the original model")
