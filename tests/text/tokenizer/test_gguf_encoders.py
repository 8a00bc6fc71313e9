"""GGUF files of text encoders: keys, defaults and older forms, in files that llama.cpp's converter writes."""

from pathlib import Path
from typing import Any

import pytest

from cases import cases
from encoder_tokenizers import SENTENCES, as_bert_gguf, as_xlmr_gguf, make_bert_folder
from infer.errors import ModelFormatError
from infer.models.catalog.explanation import _without_words
from infer.text.tokenizer import Tokenizer
from infer.text.tokenizer.gguf_vocabulary import TokenType
from test_encoder_tokenizers import CONTROL_TEXTS, TEXTS, folder_of, load
from test_tokenizer import byte_level_metadata, gguf_keys, texts_of


def assert_equal(tokenizer: Tokenizer, oracle: Any, texts: list[str] = TEXTS) -> None:
    assert [tokenizer.encode(text) for text in texts] == [oracle.encode(text) for text in texts]


@pytest.mark.parametrize("is_written", [True, False])
def test_a_cased_bert_is_told_by_its_keys_or_by_its_capital_letters(tmp_path: Path, is_written: bool) -> None:
    oracle = make_bert_folder(tmp_path, lowercase=False)
    keys = {"normalizer.lowercase": False} if is_written else {}
    assert_equal(Tokenizer.from_gguf(as_bert_gguf(tmp_path, **keys)), oracle)


def test_the_key_for_accents_is_read(tmp_path: Path) -> None:
    oracle = make_bert_folder(tmp_path, strip_accents=False)
    tokenizer = Tokenizer.from_gguf(as_bert_gguf(tmp_path, **{"normalizer.strip_accents": False}))
    assert_equal(tokenizer, oracle)
    assert tokenizer.encode("Ärger") != load("bert gguf").encode("Ärger")


def test_an_older_bert_names_its_first_token_cls_and_keeps_names_in_brackets(tmp_path: Path) -> None:
    folder, oracle = folder_of("bert")
    metadata = as_bert_gguf(folder, bos_token_id=None, cls_token_id=2, pre="jina-v2-en")
    tokens = metadata["tokenizer.ggml.tokens"]
    metadata["tokenizer.ggml.tokens"] = [token.replace("▁[unused1]", "[unused1]") for token in tokens]
    metadata["tokenizer.ggml.token_type"] = [int(TokenType.NORMAL)] * len(tokens)  # the named ids define them
    tokenizer = Tokenizer.from_gguf(metadata)
    assert_equal(tokenizer, oracle, [*TEXTS, *CONTROL_TEXTS])
    assert tokenizer.decode(range(tokenizer.vocab_size)) == load("bert").decode(range(tokenizer.vocab_size))
    del metadata["tokenizer.ggml.token_type"]
    assert Tokenizer.from_gguf(metadata).encode("a [SEP]") == oracle.encode("a [SEP]")


def test_berts_ids_are_llama_cpps_defaults_if_the_file_has_none() -> None:
    words = [f"▁w{number}" for number in range(110)]
    words[0], words[100:104] = "[PAD]", ["[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    metadata = gguf_keys(model="bert", tokens=words)
    tokenizer = Tokenizer.from_gguf(metadata)
    assert tokenizer.encode("w7 zzz [MASK]") == [101, 7, 100, 103, 102]
    assert tokenizer.special_token_ids == {0, 100, 101, 102, 103}
    with pytest.raises(ModelFormatError, match="cls_token_id: missing"):
        Tokenizer.from_gguf(metadata | {"tokenizer.ggml.tokens": words[:100]})


def test_a_word_that_the_converter_marks_twice_comes_back(tmp_path: Path) -> None:
    folder, _ = folder_of("bert")
    metadata = as_bert_gguf(folder)
    metadata["tokenizer.ggml.tokens"][-1:] = ["▁▁x"]
    tokenizer = Tokenizer.from_gguf(metadata)
    assert texts_of(tokenizer, "▁x") == ["▁x"]


UNIGRAM_FORMS: list[tuple[dict[str, Any], list[str], list[str]]] = [
    ({}, ["<s>", "A", "</s>"], ["<s>", "A", "</s>", "</s>", "B", "</s>"]),
    ({"add_sep_token": True}, ["<s>", "A", "</s>"], ["<s>", "A", "</s>", "</s>", "B", "</s>"]),
    ({"add_sep_token": False}, ["<s>", "A", "</s>"], ["<s>", "A", "</s>", "B", "</s>"]),
    ({"add_bos_token": None, "add_eos_token": None}, ["A", "</s>"], ["A", "</s>", "B", "</s>"]),  # T5
    ({"add_bos_token": False, "eos_token_id": None}, ["A", "<pad>"], ["A", "<pad>", "B", "<pad>"]),  # the default id
]


@pytest.mark.parametrize(("changes", "single", "pair"), UNIGRAM_FORMS)
def test_flags_decide_about_the_ends_of_unigram(changes: dict[str, Any], single: list[str], pair: list[str]) -> None:
    tokenizer = Tokenizer.from_gguf(as_xlmr_gguf(folder_of("xlmr")[0], **changes))
    words = {"A": texts_of(load("xlmr"), SENTENCES[0]), "B": texts_of(load("xlmr"), SENTENCES[1])}

    def spelled(form: list[str]) -> list[str]:
        return [text for part in form for text in words.get(part, [part])]

    assert texts_of(tokenizer, SENTENCES[0], add_special_tokens=True) == spelled(single)
    found = tokenizer.encode_pair(*SENTENCES[:2])
    assert [tokenizer.backend.id_to_token(token_id) for token_id in found.ids] == spelled(pair)
    is_doubled = len(pair) - len(single) == 3
    assert found.type_ids == [0] * (len(words["A"]) + len(single) - 1) + (
        [0] * (len(words["B"]) + 2) if is_doubled else [1] * (len(words["B"]) + 1)
    )


@cases(
    "prefix removes expected",
    (True, True, ["▁a", "▁", "b"]),
    (True, False, ["▁a", "▁", "▁", "b", "▁"]),
    (False, True, ["a", "▁", "b"]),
    (False, False, ["▁a", "▁", "▁", "b", "▁"]),
    (None, None, ["▁a", "▁", "▁", "b", "▁"]),
)
def test_spaces_are_those_of_sentencepieces_settings(prefix: Any, removes: Any, expected: list[str]) -> None:
    pieces, scores = ["<s>", "<pad>", "</s>", "<unk>", "▁", "a", "b", "▁a"], [0.0] * 4 + [-2.0, -2.0, -2.0, -2.5]
    settings = {"tokens": pieces, "scores": scores, "token_type": [3, 3, 3, 2, 1, 1, 1, 1], "mask_token_id": None}
    settings |= {"add_space_prefix": prefix, "remove_extra_whitespaces": removes}
    tokenizer = Tokenizer.from_gguf(as_xlmr_gguf(folder_of("xlmr")[0], **settings))
    assert texts_of(tokenizer, " a  b ") == expected
    assert tokenizer.decode(tokenizer.encode("a b")) == "a b"


def test_bytes_spell_what_unigram_has_no_piece_for() -> None:
    pieces = ["<pad>", "</s>", "<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a"]
    scores, types = [0.0] * 3 + [-9.0] * 256 + [-1.0, -1.0], [3, 3, 2, *[6] * 256, 1, 1]
    metadata = gguf_keys(model="t5", tokens=pieces, scores=scores, token_type=types, add_space_prefix=True)
    tokenizer = Tokenizer.from_gguf(metadata)
    assert texts_of(tokenizer, "aé", add_special_tokens=True) == ["▁", "a", "<0xC3>", "<0xA9>", "</s>"]


def test_a_signed_map_of_characters_is_the_same_map() -> None:
    metadata = as_xlmr_gguf(folder_of("xlmr")[0])
    key = "tokenizer.ggml.precompiled_charsmap"
    signed = [number - 256 if number > 127 else number for number in metadata[key]]
    tokenizer = Tokenizer.from_gguf(metadata | {key: signed})
    assert tokenizer.encode("Ａﬁ½") == load("xlmr").encode("Ａﬁ½")
    without = Tokenizer.from_gguf(metadata | {key: []})
    assert without.encode("Ａﬁ½") != load("xlmr").encode("Ａﬁ½")


def test_tokens_that_a_user_defined_are_found_and_shown() -> None:
    metadata = as_xlmr_gguf(folder_of("xlmr")[0])
    metadata["tokenizer.ggml.token_type"][-1] = int(TokenType.USER_DEFINED)
    tokenizer = Tokenizer.from_gguf(metadata)
    last = tokenizer.vocab_size - 1
    for parse_special in (True, False):
        assert tokenizer.encode("a[PAD9]", add_special_tokens=False, parse_special=parse_special)[-1] == last
    assert last not in tokenizer.special_token_ids


@cases(
    "changes message",
    ({"scores": None}, "scores: missing"),
    ({"scores": [0.0]}, "scores.*1 items"),
    ({"token_type": [1]}, "token_type.*1 items"),
    ({"tokens": None}, "tokens: missing"),
    ({"unknown_token_id": 9999}, "unknown_token_id: 9999 is not an id"),
    ({"bos_token_id": -1}, "bos_token_id: -1 is not an id"),
    ({"bos_token_id": None}, "bos_token_id: missing"),
    ({"add_sep_token": 1}, "add_sep_token: expected true or false"),
    ({"remove_extra_whitespaces": 1}, "remove_extra_whitespaces: expected true or false"),
    ({"precompiled_charsmap": "AAAA"}, "precompiled_charsmap: expected a list of integers"),
    ({"precompiled_charsmap": [1, 2, 3]}, "precompiled_charsmap: is not a map of characters"),
    ({"precompiled_charsmap": [4, 0, 0, 0, 0, 0, 0, 255, 255]}, "tokenizer: "),
    ({"precompiled_charsmap": [4, 0, 0, 0, 0, 0, 0, 0, 97]}, "tokenizer: the tokenizers library failed"),
)
def test_metadata_that_contradict_themselves_are_a_format_error(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelFormatError, match=rf"\AGGUF metadata[^\n]*{message}[^\n]*\Z"):
        Tokenizer.from_gguf(as_xlmr_gguf(folder_of("xlmr")[0], **changes))


@pytest.mark.parametrize("score", [float("nan"), float("inf")])
def test_a_score_that_is_no_number_is_a_format_error(score: float) -> None:
    metadata = as_xlmr_gguf(folder_of("xlmr")[0])
    metadata["tokenizer.ggml.scores"][9] = score
    with pytest.raises(ModelFormatError, match="scores: expected finite numbers"):
        Tokenizer.from_gguf(metadata)


@pytest.mark.parametrize("key", ["normalizer.lowercase", "normalizer.strip_accents"])
def test_a_bert_flag_that_is_no_flag_is_a_format_error(key: str) -> None:
    with pytest.raises(ModelFormatError, match=rf"{key}: expected true or false, got 1"):
        Tokenizer.from_gguf(as_bert_gguf(folder_of("bert")[0], **{key: 1}))


SHORT, LONG = ([*["<s>", "hello", "<|end|>"], *separators, "hello", "<|end|>"] for separators in ([], ["<|end|>"]))
BYTE_LEVEL_PAIRS = [("roberta-bpe", {}, LONG, [0] * 6), ("jina-v2-code", {}, LONG, [0] * 6)]
BYTE_LEVEL_PAIRS += [("modern-bert", {}, SHORT, [0, 0, 0, 1, 1]), ("gpt-2", {"add_sep_token": True}, LONG, [0] * 6)]


@pytest.mark.parametrize(("pre", "changes", "texts", "types"), BYTE_LEVEL_PAIRS)
def test_encoders_with_byte_pairs_have_their_form_for_pairs(pre: str, changes: Any, texts: Any, types: Any) -> None:
    metadata = byte_level_metadata(pre=pre, add_bos_token=True, add_eos_token=True, **changes)
    tokenizer = Tokenizer.from_gguf(metadata)
    pair = tokenizer.encode_pair("hello", "hello")
    assert [tokenizer.backend.id_to_token(token_id) for token_id in pair.ids] == texts
    assert pair.type_ids == types


def test_an_explanation_shows_the_whole_tokenizer_of_an_encoder() -> None:
    metadata = as_xlmr_gguf(folder_of("xlmr")[0])
    reduced, ids = _without_words(metadata)
    assert (reduced, len(ids)) == (metadata, len(metadata["tokenizer.ggml.tokens"]))
    assert _without_words({"tokenizer.ggml.model": "bert"})[1] == range(0)
