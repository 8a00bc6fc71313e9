"""The modules of a folder of sentence-transformers, with their settings and weights, and the prompts of a model.

GGUF has no keys for prompts. `infer.prompts.names` and `infer.prompts.texts` are lists of equal length,
`infer.prompts.default` is one of the names, and `infer.prompts.are_pooled` is false if vectors leave out their tokens.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, final

from infer.errors import InvalidRequestError, ModelError, ModelFormatError, UnsupportedModelError
from infer.files.tensors.safetensors import PICKLE_SUFFIXES, SINGLE_NAME, read_safetensors
from infer.files.tensors.tensor_info import TensorInfo
from infer.system.json_limits import MAX_BYTES, inside, parse_json, read_json_file, read_whole

_FILE = "modules.json"
_TRANSFORMER, _TOKENIZER = "sentence_*_config.json", "tokenizer_config.json"  # the * is the kind of an older model
_NO_LIMIT = 2**31  # tokenizers without a limit name 10^30


_SETTINGS_FILE = "config_sentence_transformers.json"
NAMES_KEY, TEXTS_KEY, DEFAULT_KEY = "infer.prompts.names", "infer.prompts.texts", "infer.prompts.default"
ARE_POOLED_KEY = "infer.prompts.are_pooled"


@final
@dataclass(frozen=True)
class SentenceModule:
    """A module: its kind, such as `Pooling`, and the path of its folder in the model's folder."""

    folder: Path
    kind: str
    path: str

    @property
    def config_name(self) -> str:
        """Name of the file of its settings."""
        return f"{self.path}/config.json"

    def config(self) -> dict[str, Any]:
        """Return its settings. Raises ModelError."""
        return read_json_file(inside(self.folder, self.config_name))

    def tensors(self) -> dict[str, TensorInfo]:
        """Return its tensors. Raises ModelError if they are pickled or missing."""
        name = f"{self.path}/{SINGLE_NAME}"
        own = self.folder / self.path
        pickles = sorted(each.name for each in own.glob("*") if each.suffix in PICKLE_SUFFIXES)
        if pickles and not (self.folder / name).exists():
            raise ModelError(
                f"{self.folder.name}: {self.path}/{pickles[0]} can run code and is never opened: save the module again "
                "as safetensors"
            )
        return read_safetensors(inside(self.folder, name))

    def unsupported(self, problem: str) -> UnsupportedModelError:
        """Return the error about an unsupported module that would change vectors."""
        return UnsupportedModelError(f"{self.folder.name}: {_FILE} has the module {self.kind!r:.60}: {problem}")


def read_modules(folder: Path) -> Sequence[SentenceModule]:
    """Return the modules of a folder in their order, or none if it has no such file.

    Raises ModelFormatError for a malformed file.
    """
    path = folder / _FILE
    if not path.exists():
        return ()
    text = read_whole(inside(folder, _FILE), MAX_BYTES)
    found = parse_json(path, b'{"modules": ' + text + b"}")["modules"]  # the file is a JSON list
    if not (isinstance(found, list) and all(_is_module(each) for each in found)):
        raise ModelFormatError(path, "modules", "expected a list of objects with type and path")
    return [SentenceModule(folder, each["type"].rpartition(".")[2], each.get("path", "")) for each in found]


def text_limit(folder: Path, *, is_encoder: bool) -> int | None:
    """Return the most tokens of a text as sentence-transformers reads them, or None if no file names them.

    They are in the settings of the module Transformer, and otherwise in the tokenizer's. Raises ModelFormatError for a
    malformed file.
    """
    modules = read_modules(folder)
    if not (modules or is_encoder):
        return None
    own = Path(modules[0].path if modules else "")
    for name, key in ((_TRANSFORMER, "max_seq_length"), (_TOKENIZER, "model_max_length")):
        for path in sorted((folder / own).glob(name)):
            found = read_json_file(inside(folder, str(own / path.name))).get(key)
            if found is None:
                continue
            if type(found) not in (int, float) or not found >= 1:
                raise ModelFormatError(path, f"key {key!r}", f"expected a number from 1, got {found!r:.60}")
            return int(found) if found < _NO_LIMIT else None
    return None


def _is_module(found: object) -> bool:
    return isinstance(found, dict) and isinstance(found.get("type"), str) and isinstance(found.get("path", ""), str)


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


def _settings_of(folder: Path) -> dict[str, Any]:
    return read_json_file(inside(folder, _SETTINGS_FILE)) if (folder / _SETTINGS_FILE).exists() else {}


def prompts_from_folder(folder: Path) -> TextPrompts:
    """Return the prompts of a folder, or none if it has no such file. Raises ModelFormatError for a malformed file."""
    path, config = folder / _SETTINGS_FILE, _settings_of(folder)
    prompts, default = config.get("prompts") or {}, config.get("default_prompt_name")
    if not (isinstance(prompts, dict) and all(isinstance(each, str) for each in prompts.values())):
        raise ModelFormatError(path, "key 'prompts'", "expected texts by name")
    if default is not None and default not in prompts:
        raise ModelFormatError(path, "key 'default_prompt_name'", f"{default!r:.80} is not the name of a prompt")
    return TextPrompts(prompts, default)


def vector_size_from_folder(folder: Path) -> int | None:
    """Return the `truncate_dim` of a folder: the number of first dimensions to keep. Raises ModelFormatError."""
    size = _settings_of(folder).get("truncate_dim")
    if size is not None and (type(size) is not int or size < 1):
        problem = f"expected a whole number from 1, got {size!r:.60}"
        raise ModelFormatError(folder / _SETTINGS_FILE, "key 'truncate_dim'", problem)
    return size


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
