"""Prompts of an embedding model, by name: texts to put before a text, from sentence-transformers' file.

GGUF has no keys for them. `infer.prompts.names` and `infer.prompts.texts` are lists of equal length,
`infer.prompts.default` is one of the names, and `infer.prompts.are_pooled` is false if vectors leave out their tokens.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, final

from infer.errors import InvalidRequestError, ModelFormatError
from infer.system.json_limits import inside, read_json_file

_FILE = "config_sentence_transformers.json"
NAMES_KEY, TEXTS_KEY, DEFAULT_KEY = "infer.prompts.names", "infer.prompts.texts", "infer.prompts.default"
ARE_POOLED_KEY = "infer.prompts.are_pooled"


@final
@dataclass(frozen=True)
class TextPrompts:
    """Prompts by name. Calls that name no prompt use the prompt named `default`."""

    by_name: Mapping[str, str] = field(default_factory=dict)
    default: str | None = None

    def text_of(self, name: str | None) -> str:
        """Return the prompt with this name, or the default prompt. Raises InvalidRequestError for an unknown name."""
        name = self.default if name is None else name
        if name is None:
            return ""
        if name not in self.by_name:
            known = f"must be one of {', '.join(map(repr, self.by_name))}" if self.by_name else "must be left out"
            why = "" if self.by_name else ": the model's files have no prompts"
            raise InvalidRequestError(f"prompt_name {known}, got {name!r:.80}{why}", param="prompt_name")
        return self.by_name[name]


def prompts_from_folder(folder: Path) -> TextPrompts:
    """Return the prompts of a folder, or none if it has no such file. Raises ModelFormatError for a malformed file."""
    path = folder / _FILE
    if not path.exists():
        return TextPrompts()
    config = read_json_file(inside(folder, _FILE))
    prompts, default = config.get("prompts") or {}, config.get("default_prompt_name")
    if not (isinstance(prompts, dict) and all(isinstance(each, str) for each in prompts.values())):
        raise ModelFormatError(path, "key 'prompts'", "expected texts by name")
    if default is not None and default not in prompts:
        raise ModelFormatError(path, "key 'default_prompt_name'", f"{default!r:.80} is not the name of a prompt")
    return TextPrompts(prompts, default)


def prompts_from_gguf(path: Path, metadata: Mapping[str, Any]) -> TextPrompts:
    """Return the prompts of a GGUF file, or none if it lacks the keys. Raises ModelFormatError for malformed keys."""
    names, texts = (metadata.get(key, []) for key in (NAMES_KEY, TEXTS_KEY))
    for key, given in ((NAMES_KEY, names), (TEXTS_KEY, texts)):
        if not (isinstance(given, list) and all(isinstance(each, str) for each in given)):
            raise ModelFormatError(path, f"key {key!r}", "expected a list of texts")
    if len(names) != len(texts):
        raise ModelFormatError(
            path, f"key {TEXTS_KEY!r}", f"expected {len(names)} texts, one per name, got {len(texts)}"
        )
    default = metadata.get(DEFAULT_KEY)
    if default is not None and default not in names:
        raise ModelFormatError(path, f"key {DEFAULT_KEY!r}", f"{default!r:.80} is not the name of a prompt")
    return TextPrompts(dict(zip(names, texts, strict=True)), default)
