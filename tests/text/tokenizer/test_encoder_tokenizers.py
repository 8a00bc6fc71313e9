"""Tokenizers of text encoders, WordPiece and Unigram: from a folder and from GGUF metadata, against `transformers`."""

import json
import random
from collections.abc import Callable
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import models, processors
from transformers import AutoTokenizer

from encoder_tokenizers import SENTENCES, as_bert_gguf, as_xlmr_gguf, make_bert_folder, make_xlmr_folder
from infer.errors import InvalidRequestError, ModelFormatError, UnsupportedModelError
from infer.text.tokenizer import Tokenizer
from refusals import check_refused
from test_detokenizer import streamed
from test_tokenizer import byte_level_metadata, random_strings

CONTROL_TEXTS = ["[CLS]", "[SEP] a [MASK]", "<s>", "x</s>y", "<mask>", "<pad><unk>"]
HARD = [
    *("", " ", "a" * 300, "\0\x07a\x7f", "  a  b ", "🙂🙃🙂🙃 x", "Þð🙂", "Ａﬁ½ﷺ\u3000e\u0301", "\u0301"),
    *("▁a ▁▁", "[PAD9]"),
]
TEXTS = [*SENTENCES, *HARD, *random_strings(11, 400)]
KINDS = ("bert", "bert gguf", "xlmr", "xlmr gguf")


@cache
def folder_of(family: str) -> tuple[Path, Any]:
    folder = Path(mkdtemp(prefix="encoder-"))
    return folder, (make_bert_folder if family == "bert" else make_xlmr_folder)(folder)


@cache
def load(kind: str) -> Tokenizer:
    family, *is_gguf = kind.split()
    folder, _ = folder_of(family)
    if not is_gguf:
        return Tokenizer.from_folder(folder)
    return Tokenizer.from_gguf((as_bert_gguf if family == "bert" else as_xlmr_gguf)(folder))


def oracle_of(kind: str) -> Any:
    return folder_of(kind.split()[0])[1]


@pytest.mark.parametrize("kind", KINDS)
def test_ids_and_decoded_text_are_those_of_transformers(kind: str) -> None:
    tokenizer, oracle = load(kind), oracle_of(kind)
    for text in [*TEXTS, *CONTROL_TEXTS]:
        ids = oracle.encode(text)
        assert (tokenizer.encode(text), tokenizer.encode(text, add_special_tokens=False)) == (ids, ids[1:-1])
        for skip in (False, True):
            assert tokenizer.decode(ids, skip) == oracle.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("kind", KINDS)
def test_streamed_text_equals_the_decoded_text_of_any_ids(kind: str) -> None:
    tokenizer, oracle = load(kind), oracle_of(kind)
    generator = random.Random(3)
    for _ in range(500):
        ids = generator.choices(range(oracle.vocab_size), k=generator.randrange(8))
        for skip in (False, True):
            found = streamed(tokenizer.make_detokenizer(skip), ids)
            assert found == tokenizer.decode(ids, skip) == oracle.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("kind", KINDS)
def test_texts_begin_and_end_with_the_tokens_of_encoders(kind: str) -> None:
    tokenizer, oracle = load(kind), oracle_of(kind)
    assert (tokenizer.bos_token_id, tokenizer.ending_ids) == (oracle.cls_token_id, [oracle.sep_token_id])
    assert tokenizer.adds_bos
    assert tokenizer.special_token_ids == set(oracle.all_special_ids)
    assert tokenizer.encode("a b", parse_special=False) == oracle.encode("a b")


@pytest.mark.parametrize("kind", KINDS)
def test_pairs_have_the_form_and_the_types_of_transformers(kind: str) -> None:
    tokenizer, oracle = load(kind), oracle_of(kind)
    long = " ".join(SENTENCES) * 5
    texts = [text for text in TEXTS if text] + [long]
    for first, second in zip(texts, reversed(texts), strict=True):
        expected = oracle(first, second, return_token_type_ids=True)
        assert tokenizer.encode_pair(first, second) == (expected["input_ids"], expected["token_type_ids"])
    num_ends = 2 if kind.startswith("bert") else 3
    assert tokenizer.encode_pair("", "").ids == [oracle.cls_token_id, *[oracle.sep_token_id] * num_ends]


@pytest.mark.parametrize("kind", KINDS)
def test_the_text_of_a_special_token_is_plain_text_in_pairs_and_where_it_is_not_parsed(kind: str) -> None:
    tokenizer = load(kind)
    control_ids = tokenizer.special_token_ids - {oracle_of(kind).unk_token_id}
    for text in CONTROL_TEXTS:
        ids = tokenizer.encode(text, add_special_tokens=False, parse_special=False)
        assert ids
        assert not control_ids & set(ids)
        assert tokenizer.encode_pair(text, "a").ids[1 : len(ids) + 1] == ids
        assert tokenizer.encode_pair("a", text).ids[-len(ids) - 1 : -1] == ids
    for text in SENTENCES:  # no other text has another spelling
        assert tokenizer.encode(text, parse_special=False) == tokenizer.encode(text)


def test_a_special_token_that_a_text_can_still_spell_is_refused(tmp_path: Path) -> None:
    backend = Backend(models.WordPiece({"[UNK]": 0, "cls": 1, "a": 2}, unk_token="[UNK]"))
    backend.add_special_tokens(["cls", "[UNK]"])
    backend.post_processor = processors.BertProcessing(("cls", 1), ("cls", 1))
    tokenizer = Tokenizer(backend, named_tokens={"unk_token": "[UNK]"})
    assert tokenizer.encode_pair("a", "b").ids == [1, 2, 1, 0, 1]
    for pair in (("cls", "a"), ("a", "cls")):
        with pytest.raises(InvalidRequestError, match=r"\Aa message contains 'cls'[^\n]*remove it\Z"):
            tokenizer.encode_pair(*pair)


@pytest.mark.parametrize("changes", [{}, {"add_bos_token": True}, {"add_bos_token": True, "add_eos_token": True}])
def test_a_tokenizer_without_a_form_for_pairs_says_so(changes: dict[str, Any]) -> None:
    tokenizer = Tokenizer.from_gguf(byte_level_metadata(**changes))
    with pytest.raises(InvalidRequestError, match=r"\Athe tokenizer has no form for pairs of texts: [^\n]+\Z"):
        tokenizer.encode_pair("hello", "hello")


def test_a_lone_surrogate_in_either_text_is_refused() -> None:
    for pair in (("a\ud83d", "b"), ("b", "a\ud83d")):
        with pytest.raises(InvalidRequestError, match=r"U\+D83D at character 1"):
            load("bert").encode_pair(*pair)


@pytest.mark.parametrize("kind", KINDS)
def test_no_encoding_is_shorter_than_its_bound(kind: str) -> None:
    for text in ("", "z" * 5000, "é世" * 3000, "\0" * 90, *TEXTS):
        assert load(kind).least_num_tokens(text) <= len(load(kind).encode(text, add_special_tokens=False))


@pytest.mark.parametrize("kind", ["bert", "bert gguf"])
def test_the_bytes_of_words_begin_with_a_space(kind: str) -> None:
    tokenizer = load(kind)
    for text, expected in (("the", b" the"), ("##e", b"e"), (".", b"."), ("n't", b"n't"), ("'", b" '")):
        assert tokenizer.token_bytes[tokenizer.backend.token_to_id(text)] == expected


# Folders


def test_flags_that_repeat_the_files_own_ends_leave_the_form_for_pairs(tmp_path: Path) -> None:
    make_xlmr_folder(tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    pair = load("xlmr").encode_pair("a", "b")
    for flag, expected in ((True, pair.ids), (False, None)):
        changed = json.dumps(config | {"add_bos_token": True, "add_eos_token": flag})
        (tmp_path / "tokenizer_config.json").write_text(changed)
        tokenizer = Tokenizer.from_folder(tmp_path)
        assert tokenizer.ending_ids == ([2] if flag else [])
        if expected is not None:
            assert tokenizer.encode_pair("a", "b").ids == expected


VOCAB_TXT_SETTINGS: list[dict[str, Any]] = [
    *({}, {"do_lower_case": False}, {"strip_accents": False, "do_lower_case": None}, {"cls_token": "[MASK]"}),
    {"tokenize_chinese_chars": False, "tokenizer_class": "BertTokenizerFast"},
]


@pytest.mark.parametrize("settings", VOCAB_TXT_SETTINGS)
def test_a_vocab_txt_gives_the_tokenizer_of_transformers(tmp_path: Path, settings: dict[str, Any]) -> None:
    write_vocab_txt(tmp_path, settings | {"tokenizer_class": settings.get("tokenizer_class", "BertTokenizer")})
    given = {name: value for name, value in settings.items() if value is not None}
    (tmp_path / "oracle").mkdir()
    write_vocab_txt(tmp_path / "oracle", given | {"tokenizer_class": "BertTokenizer"})
    oracle = AutoTokenizer.from_pretrained(tmp_path / "oracle")
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer.special_token_ids == set(oracle.all_special_ids)
    for text in TEXTS:
        ids = oracle.encode(text)
        assert tokenizer.encode(text) == ids
        assert tokenizer.decode(ids) == oracle.decode(ids, skip_special_tokens=True)
    expected = oracle("a b", "The dog", return_token_type_ids=True)
    assert tokenizer.encode_pair("a b", "The dog") == (expected["input_ids"], expected["token_type_ids"])


def write_vocab_txt(folder: Path, config: dict[str, Any], change: Callable[[str], str] = str) -> None:
    backend = load("bert").backend
    words = [backend.id_to_token(token_id) for token_id in range(backend.get_vocab_size())]
    (folder / "vocab.txt").write_text(change("\n".join([*words, "Dog", ""])), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "config.json").write_text('{"model_type": "bert"}')


def test_a_vocab_txt_of_another_tokenizer_is_refused(tmp_path: Path) -> None:
    write_vocab_txt(tmp_path, {"tokenizer_class": "BertJapaneseTokenizer"})
    message = r"\A[^\n]*'BertJapaneseTokenizer' is not supported: expected BertTokenizer[^\n]*tokenizer\.json[^\n]*\Z"
    check_refused(lambda: Tokenizer.from_folder(tmp_path), message, UnsupportedModelError)


@pytest.mark.parametrize("name", ["[CLS]", "[SEP]", "[UNK]"])
def test_a_vocab_txt_without_a_token_that_texts_need_is_refused(tmp_path: Path, name: str) -> None:
    write_vocab_txt(tmp_path, {}, lambda words: words.replace(name, "other"))
    with pytest.raises(ModelFormatError, match=rf"vocab\.txt.*'\[{name[1:-1]}\]' is not in the vocabulary"):
        Tokenizer.from_folder(tmp_path)


def test_a_vocab_txt_that_is_no_file_or_no_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "vocab.txt"
    path.write_bytes(b"[UNK]\n\xff\xfe\n")
    check_refused(lambda: Tokenizer.from_folder(tmp_path), r"vocab\.txt", ModelFormatError)
    path.unlink()
    path.mkdir()
    check_refused(lambda: Tokenizer.from_folder(tmp_path), r"vocab\.txt.*is not a regular file", ModelFormatError)


def test_a_tokenizer_json_is_read_before_a_vocab_txt(tmp_path: Path) -> None:
    make_bert_folder(tmp_path)
    (tmp_path / "vocab.txt").write_text("other")
    assert Tokenizer.from_folder(tmp_path).encode("the fox") == load("bert").encode("the fox")


def test_a_prefix_outside_wordpiece_is_refused_whatever_another_model_says(tmp_path: Path) -> None:
    make_bert_folder(tmp_path)
    path = tmp_path / "tokenizer.json"
    good = path.read_text()
    for old, new, reason in (
        ('"type": "WordPiece",\n    "unk_token"', '"type": "BPE",\n    "unk_token"', "continuing_subword_prefix"),
        ('"model": {', '"model": {"type": "BPE", "continuing_subword_prefix": "##"}, "model": {', "appears twice"),
        ('"model": {', '"model": [], "other": {', "continuing_subword_prefix"),
    ):
        assert good.count(old) == 1
        path.write_text(good.replace(old, new))
        with pytest.raises(ModelFormatError, match=reason):
            Tokenizer.from_folder(tmp_path)


def test_a_template_for_pairs_of_tokens_that_nobody_knows_is_refused(tmp_path: Path) -> None:
    folder, _ = folder_of("bert")
    saved = json.loads((folder / "tokenizer.json").read_text())
    saved["post_processor"]["pair"][0] = {"SpecialToken": {"id": "[X]", "type_id": 0}}
    (tmp_path / "tokenizer.json").write_text(json.dumps(saved))
    check_refused(lambda: Tokenizer.from_folder(tmp_path), r"'\[X\]', which special_tokens does not", ModelFormatError)
