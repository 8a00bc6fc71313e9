"""Checks of the type of each setting of a tokenizer, in JSON and in GGUF, before the settings are used."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from infer.errors import ModelFormatError

_PREFIX = "tokenizer.ggml."
TOKEN_OPTIONS = ("lstrip", "rstrip", "normalized", "single_word", "special")
_Token: Any = msgspec.defstruct("_Token", [("content", str), *((name, bool, False) for name in TOKEN_OPTIONS)])
_NamedTemplate: Any = msgspec.defstruct("_NamedTemplate", [("name", str), ("template", str)])


class _Kind(NamedTuple):
    words: str
    type: Any

    def check(self, place: Path | str, name: str, value: Any) -> None:
        """Raise ModelFormatError for a value of another type. None means absent."""
        try:
            msgspec.convert(value, self.type | None)
        except msgspec.ValidationError:
            raise ModelFormatError(place, name, f"expected {self.words}, got {value!r:.80}") from None


_ID = _Kind("an id", int)
_FLAG = _Kind("true or false", bool)
_FLAGS_OF_JSON = ("add_bos_token", "add_eos_token", "do_lower_case", "strip_accents", "tokenize_chinese_chars")
_FLAGS_OF_GGUF = (
    *("add_bos_token", "add_eos_token", "add_sep_token", "add_space_prefix", "remove_extra_whitespaces"),
    *("normalizer.lowercase", "normalizer.strip_accents"),
)
_INTEGERS = ("token_type", "eos_token_ids", "precompiled_charsmap")
_JSON_KINDS = {
    **dict.fromkeys(_FLAGS_OF_JSON, _FLAG),
    "added_tokens_decoder": _Kind("an object of tokens", dict[str, _Token]),
    "chat_template": _Kind("a text or a list of named texts", str | list[_NamedTemplate]),
    "eos_token_id": _Kind("an id or a list of ids", int | list[int]),
}
_GGUF_KINDS = {
    **dict.fromkeys(("model", "pre"), _Kind("a name", str)),
    **dict.fromkeys(("tokens", "merges"), _Kind("a list of texts", list[str])),
    **dict.fromkeys(_INTEGERS, _Kind("a list of integers", list[int])),
    **dict.fromkeys(_FLAGS_OF_GGUF, _FLAG),
    "scores": _Kind("a list of numbers", list[float]),
}


def check_json(path: Path, settings: Mapping[str, Any]) -> None:
    """Raise ModelFormatError for a wrong type in tokenizer_config.json or a similar file. Null means absent."""
    for name, kind in _JSON_KINDS.items():
        kind.check(path, name, settings.get(name))


def check_metadata(metadata: Mapping[str, Any]) -> None:
    """Raise ModelFormatError for a wrong type in a GGUF file's metadata."""
    for key, value in metadata.items():
        name = key.removeprefix(_PREFIX)
        kind = _ID if name.endswith("_token_id") else _GGUF_KINDS.get(name)
        if kind is not None and name != key:
            kind.check("GGUF metadata", key, value)
