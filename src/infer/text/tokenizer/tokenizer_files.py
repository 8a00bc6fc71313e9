"""Read the parts of a tokenizer from the JSON files of a folder, or from the metadata of a GGUF file."""

import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import tokenizers
from tokenizers import AddedToken, models

from infer.errors import ModelFormatError, UnsupportedModelError
from infer.system.json_limits import read_json_file, read_text_file, read_whole
from infer.text.tokenizer.gguf_encoders import is_encoder, make_encoder_backend, make_wordpiece, with_default_ids
from infer.text.tokenizer.gguf_vocabulary import (
    CONTROL_NAMES,
    END_IDS,
    make_bos_eos_processor,
    make_gguf_backend,
    without_tokens_from,
)
from infer.text.tokenizer.tokenizers_library import (
    MAX_BYTES,
    ids_around,
    load_backend,
    lowercase,
    panics_as,
    without_ids_from,
)
from infer.text.tokenizer.value_checks import TOKEN_OPTIONS, check_json

_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
GGUF_NAMES = dict(zip(("bos", "eos", "unknown", "seperator", "padding", "cls", "mask"), _NAMED_TOKENS, strict=True))
_ENDS = ("bos", "eos")
_CONFIG_NAME = "tokenizer_config.json"
# The settings of Hugging Face's BertTokenizer that a tokenizer_config.json may leave out.
_BERT_DEFAULTS = {f"{name}_token": f"[{name.upper()}]" for name in ("unk", "sep", "pad", "cls", "mask")}
_BERT_CLASSES = tuple(f"{name}Tokenizer{kind}" for name in ("Bert", "DistilBert", "Electra") for kind in ("", "Fast"))
Ends = tuple[str | None, str | None]


class TokenizerParts(NamedTuple):
    """The arguments of `Tokenizer`."""

    backend: tokenizers.Tokenizer
    named_tokens: Mapping[str, str]
    end_token_ids: Iterable[int]
    chat_templates: Mapping[str, str]
    vocabulary: Sequence[str] | None = None


def read_folder(path: Path, num_rows: int | None = None) -> TokenizerParts:
    """Return the parts of a folder's tokenizer. An added token from `num_rows` on is no token.

    Raises ModelError if a file is missing or breaks its format.
    """
    config = _read_config(path)
    is_vocab_txt = not os.path.lexists(path / "tokenizer.json") and os.path.lexists(path / "vocab.txt")
    if is_vocab_txt:
        config = _with_bert_defaults(path, config)
    named_tokens = {name: text for name in _NAMED_TOKENS if (text := _token_text(config.get(name))) is not None}
    if is_vocab_txt:
        backend = _load_vocab_txt(path / "vocab.txt", config, named_tokens)
    else:
        backend = load_backend(path / "tokenizer.json")
    if any(_read_json(file).get("do_lower_case") for file in path.glob("sentence_*_config.json")):
        lowercase(backend)
    listed = {str(token_id): {"content": text} for text, token_id in _read_json(path / "added_tokens.json").items()}
    _add_missing_tokens(backend, listed | (config.get("added_tokens_decoder") or {}))
    _make_special(backend, CONTROL_NAMES.union(named_tokens.values()))
    if num_rows is not None:
        backend = without_ids_from(num_rows, path, backend)
    if "add_bos_token" in config or "add_eos_token" in config:
        own, wanted = _added_ends(backend, config, named_tokens)
        if wanted != own:  # otherwise keep the file's own processor, which may have a form for pairs
            backend.post_processor = make_bos_eos_processor(backend, *wanted)
    return TokenizerParts(
        backend,
        named_tokens=named_tokens,
        end_token_ids=_end_ids(path),
        chat_templates=_read_chat_templates(path, config),
    )


def read_gguf(metadata: Mapping[str, Any], num_rows: int | None = None) -> TokenizerParts:
    """Return the parts of a GGUF file's tokenizer. A token from `num_rows` on is no token unless it is a normal one.

    Raises ModelError if a key is missing or its value is wrong.
    """
    if num_rows is not None:
        metadata = without_tokens_from(num_rows, metadata)
    if is_encoder(metadata):
        metadata = with_default_ids(metadata)
        backend, vocabulary = make_encoder_backend(metadata)
    else:
        backend, vocabulary = make_gguf_backend(metadata)
    ids = {name: metadata.get(f"tokenizer.ggml.{own}_token_id", -1) for own, name in GGUF_NAMES.items()}
    named_tokens = {name: vocabulary[token_id] for name, token_id in ids.items() if token_id in range(len(vocabulary))}
    end_ids = [metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    end_ids += metadata.get(END_IDS) or ()
    return TokenizerParts(
        backend,
        named_tokens=named_tokens,
        end_token_ids=[token_id for token_id in end_ids if token_id is not None],
        chat_templates=_gguf_chat_templates(metadata),
        vocabulary=vocabulary,
    )


def read_template(path: Path, metadata: Mapping[str, Any]) -> str | None:
    """Return the chat template of a model that is not loaded. `metadata` is from a GGUF file, or {} for a folder."""
    templates = (
        _gguf_chat_templates(metadata) if metadata else _read_chat_templates(path, _read_json(path / _CONFIG_NAME))
    )
    return templates.get("default")


def read_token_names(path: Path, metadata: Mapping[str, Any]) -> Collection[str]:
    """Return the names of a model's tokens, for a folder only of those added to the vocabulary, without a tokenizer."""
    if metadata:
        return frozenset(metadata.get("tokenizer.ggml.tokens", ()))
    added = _read_json(path / _CONFIG_NAME).get("added_tokens_decoder") or {}
    return frozenset(entry["content"] for entry in added.values())


def _gguf_chat_templates(metadata: Mapping[str, Any]) -> dict[str, str]:
    prefix = "tokenizer.chat_template"
    return {
        key[len(prefix) + 1 :] or "default": value
        for key, value in metadata.items()
        if (key == prefix or key.startswith(f"{prefix}.")) and isinstance(value, str)
    }


def _added_ends(
    backend: tokenizers.Tokenizer, config: Mapping[str, Any], named_tokens: Mapping[str, str]
) -> tuple[Ends, Ends]:
    """Return the tokens before and after each text: those of the file's own processor, and the wanted ones.

    The config's flags decide if they are added. Without flags, the file's own processor decides: Qwen3-Embedding's
    processor ends texts with a token other than `eos_token`.
    """
    before, _, after = ids_around(backend)
    first, last = (backend.id_to_token(ids[0]) if ids else None for ids in (before, after[-1:]))
    own = first, last
    bos, eos = (
        (named_tokens.get(f"{name}_token") if config[f"add_{name}_token"] else None)
        if f"add_{name}_token" in config
        else token
        for name, token in zip(_ENDS, own, strict=True)
    )
    return own, (bos, eos)


def _read_json(path: Path) -> dict[str, Any]:
    if not os.path.lexists(path):  # lexists: a broken link must be an error
        return {}
    settings = read_json_file(path)
    check_json(path, settings)
    return settings


def _read_config(path: Path) -> dict[str, Any]:
    """Return a tokenizer's settings. Tokens that they lack, or have as null, are those of the older file of tokens."""
    own = _read_json(path / _CONFIG_NAME)
    given = {name: value for name, value in own.items() if value is not None or name not in _NAMED_TOKENS}
    return {**_read_json(path / "special_tokens_map.json"), **given}


def _read_chat_templates(path: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Return the templates by name.

    The first existing source is used: `chat_template.jinja`, `chat_template.json`, or the configuration's, which may be
    a list of named templates. Templates in `additional_chat_templates/` are added, named by their files.
    """
    template = _read_json(path / "chat_template.json").get("chat_template", config.get("chat_template"))
    templates = {"default": template} if isinstance(template, str) else {}
    for entry in template if isinstance(template, list) else ():
        templates[entry["name"]] = entry["template"]
    if os.path.lexists(file := path / "chat_template.jinja"):
        templates = {"default": read_text_file(file)}
    for file in sorted((path / "additional_chat_templates").glob("*.jinja")):
        templates[file.stem] = read_text_file(file)
    return templates


def _with_bert_defaults(path: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a folder that has a `vocab.txt` and no tokenizer.json.

    Raises UnsupportedModelError if they name a tokenizer other than BERT's, because others split text by other rules.
    """
    name = config.get("tokenizer_class") or _BERT_CLASSES[0]
    if name not in _BERT_CLASSES:
        raise UnsupportedModelError(
            f"{path}: a vocab.txt of {name!r:.80} is not supported: expected {', '.join(_BERT_CLASSES)}, or a "
            "tokenizer.json, which save_pretrained of transformers writes"
        )
    return {**_BERT_DEFAULTS, **{name: value for name, value in config.items() if value is not None}}


def _load_vocab_txt(path: Path, config: Mapping[str, Any], names: Mapping[str, str]) -> tokenizers.Tokenizer:
    """Return the backend of BERT's `vocab.txt`, which has a token per line.

    `names` has the texts of `cls_token` and others. Raises ModelFormatError if the file is not text or lacks a token
    that each text needs.
    """
    read_whole(path, MAX_BYTES)
    with panics_as(lambda problem: ModelFormatError(path, "vocabulary", problem)):
        vocabulary = models.WordPiece.read_file(str(path))
    for needed in ("cls_token", "sep_token", "unk_token"):
        if names[needed] not in vocabulary:
            raise ModelFormatError(path, needed, f"{names[needed]!r:.80} is not in the vocabulary")
    return make_wordpiece(
        vocabulary,
        names,
        lowercase=config.get("do_lower_case", True),
        strip_accents=config.get("strip_accents"),
        splits_chinese=config.get("tokenize_chinese_chars", True),
    )


def _add_missing_tokens(backend: tokenizers.Tokenizer, added_tokens: Mapping[str, Any]) -> None:
    for _, entry in sorted(added_tokens.items(), key=lambda item: (len(item[0]), item[0])):  # by id
        if backend.token_to_id(entry["content"]) is None:
            options = {name: entry[name] for name in TOKEN_OPTIONS if name in entry}
            backend.add_tokens([AddedToken(entry["content"], **options)])


def _make_special(backend: tokenizers.Tokenizer, names: Collection[str]) -> None:
    """Make tokens with these names special, if the vocabulary has them.

    Some files mark a token that begins a turn as an ordinary one.
    """
    added = {token.content: token for token in backend.get_added_tokens_decoder().values()}
    for text in sorted(names):
        token = added.get(text)
        if (token is None or not token.special) and backend.token_to_id(text) is not None:
            options = {} if token is None else {name: getattr(token, name) for name in TOKEN_OPTIONS[:-1]}
            backend.add_special_tokens([AddedToken(text, **{"normalized": False, **options, "special": True})])


def _token_text(value: Any) -> str | None:
    """Return the text of a named token, which is a text or an object with the text in `content`."""
    if isinstance(value, Mapping):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _end_ids(path: Path) -> Sequence[int]:
    """Return the ids of `eos_token_id` in the first file or part that has it, in transformers' order."""
    if (found := _read_json(path / "generation_config.json").get("eos_token_id")) is None:
        config = _read_json(path / "config.json")
        text = config.get("text_config")
        for settings in (config, text if isinstance(text, Mapping) else {}):
            check_json(path / "config.json", {"eos_token_id": settings.get("eos_token_id")})
            if (found := settings.get("eos_token_id")) is not None:
                break
    return [] if found is None else [found] if isinstance(found, int) else found
