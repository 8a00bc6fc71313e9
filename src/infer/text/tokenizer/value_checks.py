"""Checks of the type of each setting of a tokenizer, in JSON and in GGUF, before the settings are used."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from infer.errors import ModelFormatError

_PREFIX = "tokenizer.ggml."
TOKEN_OPTIONS = ("lstrip", "rstrip", "normalized", "single_word", "special")


class _Kind(NamedTuple):
    words: str
    holds: Callable[[Any], bool]


def _is_id(value: Any) -> bool:
    return type(value) is int


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_list(*types: type) -> Callable[[Any], bool]:
    """Return a check for a list. It checks only the first item, because a GGUF file's arrays have items of one type."""
    return lambda value: isinstance(value, list) and all(isinstance(item, types) for item in value[:1])


def _is_token(value: Any) -> bool:
    if not isinstance(value, dict) or not isinstance(value.get("content"), str):
        return False
    return all(isinstance(value.get(option, False), bool) for option in TOKEN_OPTIONS)


def _is_template(value: Any) -> bool:
    return _is_text(value) or (
        isinstance(value, list)
        and all(isinstance(x, dict) and _is_text(x.get("name")) and _is_text(x.get("template")) for x in value)
    )


_ID = _Kind("an id", _is_id)
_FLAG = _Kind("true or false", lambda value: isinstance(value, bool))
_FLAGS_OF_JSON = ("add_bos_token", "add_eos_token", "do_lower_case", "strip_accents", "tokenize_chinese_chars")
_FLAGS_OF_GGUF = (
    *("add_bos_token", "add_eos_token", "add_sep_token", "add_space_prefix", "remove_extra_whitespaces"),
    *("normalizer.lowercase", "normalizer.strip_accents"),
)
_INTEGERS = ("token_type", "eos_token_ids", "precompiled_charsmap")
_JSON_KINDS = {
    **dict.fromkeys(_FLAGS_OF_JSON, _FLAG),
    "added_tokens_decoder": _Kind(
        "an object of tokens", lambda value: isinstance(value, dict) and all(map(_is_token, value.values()))
    ),
    "chat_template": _Kind("a text or a list of named texts", _is_template),
    "eos_token_id": _Kind(
        "an id or a list of ids", lambda value: _is_id(value) or (isinstance(value, list) and all(map(_is_id, value)))
    ),
}
_GGUF_KINDS = {
    **dict.fromkeys(("model", "pre"), _Kind("a name", _is_text)),
    **dict.fromkeys(("tokens", "merges"), _Kind("a list of texts", _is_list(str))),
    **dict.fromkeys(_INTEGERS, _Kind("a list of integers", _is_list(int))),
    **dict.fromkeys(_FLAGS_OF_GGUF, _FLAG),
    "scores": _Kind("a list of numbers", _is_list(float, int)),
}


def check_json(path: Path, settings: Mapping[str, Any]) -> None:
    """Raise ModelFormatError for a wrong type in tokenizer_config.json or a similar file. Null means absent."""
    for name, kind in _JSON_KINDS.items():
        if settings.get(name) is not None and not kind.holds(settings[name]):
            raise ModelFormatError(path, name, f"expected {kind.words}, got {settings[name]!r:.80}")


def check_metadata(metadata: Mapping[str, Any]) -> None:
    """Raise ModelFormatError for a wrong type in a GGUF file's metadata."""
    for key, value in metadata.items():
        name = key.removeprefix(_PREFIX)
        if not key.startswith(_PREFIX):
            continue
        kind = _ID if name.endswith("_token_id") else _GGUF_KINDS.get(name)
        if kind is not None and value is not None and not kind.holds(value):
            raise ModelFormatError("GGUF metadata", key, f"expected {kind.words}, got {value!r:.80}")
