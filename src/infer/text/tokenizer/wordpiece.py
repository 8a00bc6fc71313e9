"""BERT's tokenizer: normalize a text, split it into words, and spell each word with WordPiece or as unknown."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

from infer.errors import ModelFormatError, UnsupportedModelError
from infer.system.json_limits import read_whole
from infer.text.tokenizer.gguf_vocabulary import make_bos_eos_processor
from infer.text.tokenizer.tokenizers_library import MAX_BYTES, panics_as

PREFIX = "##"
# The settings of Hugging Face's BertTokenizer that a tokenizer_config.json may leave out.
_DEFAULTS = {f"{name}_token": f"[{name.upper()}]" for name in ("unk", "sep", "pad", "cls", "mask")}
_CLASSES = tuple(f"{name}Tokenizer{kind}" for name in ("Bert", "DistilBert", "Electra") for kind in ("", "Fast"))


def with_bert_defaults(path: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a folder that has a `vocab.txt` and no tokenizer.json.

    Raises UnsupportedModelError if they name a tokenizer other than BERT's, because others split text by other rules.
    """
    name = config.get("tokenizer_class") or _CLASSES[0]
    if name not in _CLASSES:
        raise UnsupportedModelError(
            f"{path}: a vocab.txt of {name!r:.80} is not supported: expected {', '.join(_CLASSES)}, or a "
            "tokenizer.json, which save_pretrained of transformers writes"
        )
    return {**_DEFAULTS, **{name: value for name, value in config.items() if value is not None}}


def load_vocab_txt(path: Path, config: Mapping[str, Any], names: Mapping[str, str]) -> Tokenizer:
    """Return the backend of a `vocab.txt`, which has a token per line. `names` are the texts of `cls_token` and so on.

    Raises ModelFormatError if the file is not text or lacks a token that each text needs.
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
