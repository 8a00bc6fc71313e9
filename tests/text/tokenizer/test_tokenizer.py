"""Text ↔ ids: from a folder, from GGUF metadata, and against `tokenizers` and `transformers`."""

import json
import random
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast

from assets import asset
from byte_tokenizer import write_byte_tokenizer
from cases import cases
from infer.errors import InvalidRequestError, ModelFormatError, UnsupportedModelError
from infer.files import resolve
from infer.files.gguf.gguf import read_gguf
from infer.text.tokenizer import Tokenizer
from infer.text.tokenizer.gguf_vocabulary import TokenType, _find_splits
from refusals import check_refused

NUM_RANDOM_STRINGS = 3000

# Merges of a toy vocabulary: enough for words, spaces, digits and an accent.
TOY_MERGES = ["h e", "l l", "he ll", "hell o", "Ġ hello", "Ġ Ġ", "1 2", "Ã ©", "Ċ Ċ"]


def gguf_keys(**values: Any) -> dict[str, Any]:
    return {f"tokenizer.ggml.{name}": value for name, value in values.items()}


def byte_level_metadata(**changes: Any) -> dict[str, Any]:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*alphabet, *(merge.replace(" ", "") for merge in TOY_MERGES), "<|end|>", "<think>", "<s>"]
    types = [1] * len(tokens)
    types[-3:] = [TokenType.CONTROL, TokenType.USER_DEFINED, TokenType.CONTROL]
    metadata = gguf_keys(model="gpt2", pre="gpt-2", tokens=tokens, token_type=types, merges=TOY_MERGES)
    ends = gguf_keys(bos_token_id=len(tokens) - 1, eos_token_id=len(tokens) - 3)
    return metadata | ends | gguf_keys(**changes)


def sentencepiece_metadata(**changes: Any) -> dict[str, Any]:
    others = ["<unk>", "<s>", "</s>", *(f"<0x{value:02X}>" for value in range(256))]
    types = [TokenType.UNKNOWN, TokenType.CONTROL, TokenType.CONTROL, *[TokenType.BYTE] * 256]
    pieces = ["▁t", "he", "▁the", "ll", "hell", "hello", "▁hello", "▁", *"thelo"]
    scores = [0.0] * len(others) + [-float(rank) for rank in range(len(pieces))]
    types += [TokenType.NORMAL] * len(pieces)
    metadata = gguf_keys(model="llama", tokens=others + pieces, token_type=list(map(int, types)), scores=scores)
    return metadata | gguf_keys(bos_token_id=1, eos_token_id=2, unknown_token_id=0) | gguf_keys(**changes)


def texts_of(tokenizer: Tokenizer, text: str, add_special_tokens: bool = False) -> list[str]:
    return [tokenizer.backend.id_to_token(i) for i in tokenizer.encode(text, add_special_tokens)]


@pytest.mark.parametrize("own", [{}, {"eos_token": None}, {"eos_token": "<|im_end|>"}])
def test_a_special_token_that_the_config_lacks_is_that_of_the_older_file(tmp_path: Path, own: dict[str, Any]) -> None:
    write_byte_tokenizer(tmp_path, controls=["<stop>"])
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(own))
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"eos_token": {"content": "<stop>"}}))
    tokenizer = Tokenizer.from_folder(tmp_path)
    is_lacking = own.get("eos_token") is None
    assert (tokenizer.backend.token_to_id("<stop>") in tokenizer.eos_token_ids) == is_lacking
    if is_lacking:
        assert PreTrainedTokenizerFast.from_pretrained(tmp_path).eos_token == "<stop>"


@given(st.text())
def test_byte_level_text_comes_back_exactly(text: str) -> None:
    for each in (text, "", "\0", "\ufeff", "\u200d\u200d", "‮abc", "𝕳", "<|end|>", "e\u0301"):
        assert _toy().decode(_toy().encode(each), skip_special_tokens=False) == each


@cache
def _toy() -> Tokenizer:
    return Tokenizer.from_gguf(byte_level_metadata())


def test_merges_apply_within_words_of_the_pre_tokenizer() -> None:
    assert texts_of(_toy(), "hello hello  12é") == ["hello", "Ġhello", "Ġ", "Ġ", "12", "Ã©"]
    smollm = Tokenizer.from_gguf(byte_level_metadata(pre="smollm"))
    assert texts_of(smollm, "12 3") == ["1", "2", "Ġ", "3"]


def test_control_tokens_are_special_and_user_defined_ones_are_shown() -> None:
    ids = _toy().encode("hello<think><|end|>")
    assert [_toy().backend.id_to_token(i) for i in ids] == ["hello", "<think>", "<|end|>"]
    assert _toy().decode(ids) == "hello<think>"
    assert _toy().special_token_ids == {_toy().vocab_size - 1, _toy().vocab_size - 3}


def test_bos_is_added_only_where_the_file_asks() -> None:
    assert not _toy().adds_bos
    asking = Tokenizer.from_gguf(byte_level_metadata(add_bos_token=True, add_eos_token=True))
    assert asking.adds_bos
    assert texts_of(asking, "hello", add_special_tokens=True) == ["<s>", "hello", "<|end|>"]
    assert texts_of(asking, "hello") == ["hello"]
    assert Tokenizer.from_gguf(byte_level_metadata(pre="llama-bpe")).adds_bos
    assert not Tokenizer.from_gguf(byte_level_metadata(pre="llama-bpe", add_bos_token=False)).adds_bos


def test_an_unknown_model_is_named_with_those_supported() -> None:
    with pytest.raises(UnsupportedModelError, match=r"'rwkv'.*gpt2.*llama.*gemma4.*bert.*t5"):
        Tokenizer.from_gguf(byte_level_metadata(model="rwkv"))


def test_tokens_that_begin_or_end_a_turn_are_control_tokens_in_any_folder(tmp_path: Path) -> None:
    backend = Backend.from_str(_toy().backend.to_str())
    ordinary = ("<|im_start|>", "<|im_end|>", "<b>")
    backend.add_tokens([AddedToken(text, normalized=False, lstrip=True) for text in ordinary])
    write_folder(tmp_path, {"pad_token": "<think>"})
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.from_folder(tmp_path)
    special = {tokenizer.backend.id_to_token(token_id) for token_id in tokenizer.special_token_ids}
    assert special == {"<|end|>", "<s>", "<think>", "<|im_start|>", "<|im_end|>"}
    assert tokenizer.encode("hello <|im_start|><b>") == backend.encode("hello <|im_start|><b>").ids
    assert tokenizer.backend.token_to_id("<|im_end|>") in tokenizer.eos_token_ids


def test_an_end_of_turn_is_control_whatever_the_file_calls_it() -> None:
    tokens = byte_level_metadata()["tokenizer.ggml.tokens"]
    for wrong in (TokenType.NORMAL, TokenType.USER_DEFINED):
        changes = {"tokens": [*tokens, "<|im_end|>", "</a>"], "token_type": [1] * len(tokens) + [wrong] * 2}
        tokenizer = Tokenizer.from_gguf(byte_level_metadata(**changes))
        assert len(tokens) in tokenizer.special_token_ids & tokenizer.eos_token_ids
        assert len(tokens) + 1 not in tokenizer.special_token_ids


@cases(
    "changes message",
    ({"merges": ["h e", "nonsense"]}, "merges"),
    ({"merges": ["h zebra"]}, "merges"),
    ({"token_type": [1, 2]}, "token_type.*2 items"),
    ({"tokens": None}, "tokens.*missing"),
    ({"tokens": [1, 2]}, "tokens.*list of texts"),
    ({"bos_token_id": 99999, "add_bos_token": True}, "bos_token_id.*99999"),
)
def test_metadata_that_contradict_themselves_are_a_format_error(changes: dict[str, Any], message: str) -> None:
    check_refused(lambda: Tokenizer.from_gguf(byte_level_metadata(**changes)), message, ModelFormatError)


def test_sentencepiece_merges_by_score_and_falls_back_to_bytes() -> None:
    tokenizer = Tokenizer.from_gguf(sentencepiece_metadata(add_space_prefix=False))
    assert texts_of(tokenizer, "hello the é") == ["hello", "▁the", "▁", "<0xC3>", "<0xA9>"]
    assert tokenizer.adds_bos
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids) == (1, {2})


def test_a_space_that_encoding_puts_in_front_decoding_takes_away() -> None:
    tokenizer = Tokenizer.from_gguf(sentencepiece_metadata())
    assert texts_of(tokenizer, "hello") == ["▁hello"]
    for text in ("hello", " hello", "the\n🙂 the"):
        assert tokenizer.decode(tokenizer.encode(text)) == text


@given(st.lists(st.text(alphabet="abc▁é🙂", min_size=1, max_size=6), min_size=1, max_size=30, unique=True))
def test_the_splits_found_by_hashing_are_all_splits(texts: list[str]) -> None:
    _, lefts, rights = _find_splits(texts)
    found = {(texts[left], texts[right]) for left, right in zip(lefts, rights, strict=True)}
    known = set(texts)
    assert found == {(t[:cut], t[cut:]) for t in texts for cut in range(1, len(t)) if {t[:cut], t[cut:]} <= known}


def test_a_lone_surrogate_is_refused_in_one_line() -> None:
    check_refused(lambda: _toy().encode("ab\ud83d"), r"\A[^\n]*U\+D83D at character 2[^\n]*\Z")


@pytest.mark.slow
def test_a_megabyte_of_one_character_is_encoded_in_linear_time() -> None:
    for tokenizer in (_toy(), Tokenizer.from_gguf(sentencepiece_metadata(add_space_prefix=False))):
        text = "h" * 1_000_000
        assert tokenizer.decode(tokenizer.encode(text)) == text


# A folder


def write_folder(path: Path, config: dict[str, Any] | None = None, **files: Any) -> Path:
    _toy().backend.save(str(path / "tokenizer.json"))
    for name, content in {"tokenizer_config": config or {}, **files}.items():
        (path / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
    return path


def test_a_folder_gives_the_tokenizer_that_was_saved(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_folder(write_folder(tmp_path, {"bos_token": "<s>"}))
    assert tokenizer.encode("hello <|end|>é") == _toy().encode("hello <|end|>é")
    assert tokenizer.token_bytes == _toy().token_bytes
    assert (tokenizer.bos_token_id, tokenizer.adds_bos) == (_toy().bos_token_id, False)


def test_the_configuration_decides_about_bos(tmp_path: Path) -> None:
    config = {"bos_token": {"content": "<s>"}, "add_bos_token": True}
    assert Tokenizer.from_folder(write_folder(tmp_path, config)).adds_bos


@pytest.mark.parametrize("listed", [3, [3, 4]])
def test_the_end_set_joins_all_sources(tmp_path: Path, listed: int | list[int]) -> None:
    folder = write_folder(tmp_path, {"eos_token": "<s>"}, generation_config={"eos_token_id": listed})
    tokenizer = Tokenizer.from_folder(folder)
    named = {tokenizer.backend.token_to_id("<s>"), tokenizer.backend.token_to_id("<|end|>")}
    assert tokenizer.eos_token_ids == named | set([listed] if isinstance(listed, int) else listed)


def test_gguf_end_of_turn_and_message_ids_end_too() -> None:
    tokenizer = Tokenizer.from_gguf(byte_level_metadata(eot_token_id=5, eom_token_id=6))
    assert tokenizer.eos_token_ids == {5, 6, tokenizer.vocab_size - 3}


def test_the_template_is_found_in_each_of_its_places(tmp_path: Path) -> None:
    for file, content, found in (
        ("tokenizer_config.json", '{"chat_template": [{"name": "default", "template": "list"}]}', "list"),
        ("tokenizer_config.json", '{"chat_template": "config"}', "config"),
        ("chat_template.json", '{"chat_template": "json"}', "json"),
        ("chat_template.jinja", "jinja", "jinja"),
    ):
        (write_folder(tmp_path) / file).write_text(content)
        assert Tokenizer.from_folder(tmp_path).chat_template == found


def test_tokens_that_only_the_configuration_adds_are_added(tmp_path: Path) -> None:
    entry = {"content": "<new>", "special": True, "lstrip": False, "rstrip": False, "normalized": False}
    tokenizer = Tokenizer.from_folder(write_folder(tmp_path, {"added_tokens_decoder": {"999": entry}}))
    assert texts_of(tokenizer, "<new>") == ["<new>"]
    assert tokenizer.token_bytes[-1] == b"<new>"


@pytest.mark.parametrize("content", ["", "{", "[]", '{"model": {}}'])
def test_a_broken_tokenizer_file_is_a_format_error(tmp_path: Path, content: str) -> None:
    (tmp_path / "tokenizer.json").write_text(content)
    check_refused(lambda: Tokenizer.from_folder(tmp_path), r"tokenizer\.json", ModelFormatError)


def test_a_missing_or_broken_configuration(tmp_path: Path) -> None:
    check_refused(lambda: Tokenizer.from_folder(tmp_path), "missing", ModelFormatError)
    write_folder(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("[1]")
    check_refused(lambda: Tokenizer.from_folder(tmp_path), "tokenizer_config", ModelFormatError)


# Real vocabularies

SCRIPTS = [range(32, 127), range(160, 592), range(880, 1424), range(1424, 1792), range(2304, 2432), range(3585, 3676),
           range(0x3040, 0x3100), range(0x4E00, 0x9FA6), range(0xAC00, 0xD7A4), range(0x1F300, 0x1F650),
           range(0x300, 0x370), range(0x2000, 0x2070)]  # fmt: skip
FRAGMENTS = [
    " ", "  ", "\n", "\n\n", "\t", "\r\n", "    ", "'s", "'LL", "don't", "123", "4567890", "½", "\xa0", "\u3000",
    "def f(x):\n    return x", "https://a.b/c?d=e", "\U0001f468\u200d\U0001f469\u200d\U0001f467", "🇫🇷", "e\u0301",
    "ﬁ", "ﷺ", "\u200d", "▁", "<", "|>", "...", "hello", "World", "ĠĊ", "\x00", "\x7f", "\ufffd", "Ω", "𝕳", "</td>",
    "--", "_x", "#include",
]  # fmt: skip


def random_strings(seed: int, count: int = NUM_RANDOM_STRINGS) -> list[str]:
    generator = random.Random(seed)

    def piece() -> str:
        kind = generator.random()
        if kind < 0.5:
            return generator.choice(FRAGMENTS)
        script = generator.choice(SCRIPTS)
        return "".join(chr(generator.choice(script)) for _ in range(generator.randrange(1, 8)))

    return ["".join(piece() for _ in range(generator.randrange(1, 12))) for _ in range(count)]


@cache
def load(name: str) -> Tokenizer:
    return Tokenizer.from_folder(folder(name))


def folder(name: str) -> Path:
    return asset(f"tokenizers/{name}")


@cache
def gguf_metadata(name: str) -> dict[str, Any]:
    """Return the metadata of an installed model."""
    try:
        return read_gguf(resolve(name)).metadata
    except InvalidRequestError as error:
        pytest.skip(str(error))


@cache
def load_gguf(name: str) -> Tokenizer:
    return Tokenizer.from_gguf(gguf_metadata("smollm2" if name == "smollm2" else "gemma3-270m"))


def as_gguf(name: str, pre: str) -> dict[str, Any]:
    """Return the metadata that a converter writes for this `tokenizer.json`."""
    saved = json.loads((folder(name) / "tokenizer.json").read_text(encoding="utf-8"))
    token_ids = dict(saved["model"]["vocab"])
    types = dict.fromkeys(token_ids.values(), int(TokenType.NORMAL))
    for added in saved["added_tokens"]:
        token_ids[added["content"]] = added["id"]
        types[added["id"]] = int(TokenType.CONTROL if added["special"] else TokenType.USER_DEFINED)
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in saved["model"]["merges"]]
    tokens, kinds = sorted(token_ids, key=token_ids.__getitem__), [types[token_id] for token_id in sorted(types)]
    return gguf_keys(model="gpt2", pre=pre, tokens=tokens, token_type=kinds, merges=merges)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama3_1", "qwen3", "gemma3"])
def test_folders_encode_as_transformers(name: str) -> None:
    import transformers

    oracle = transformers.AutoTokenizer.from_pretrained(folder(name))
    for text in random_strings(4, 500):
        assert load(name).encode(text) == oracle.encode(text)
        assert load(name).encode(text, add_special_tokens=False) == oracle.encode(text, add_special_tokens=False)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama3_1", "qwen3", "gemma3", "smollm2"])
def test_decoding_equals_tokenizers_and_gives_the_text_back(name: str) -> None:
    tokenizer = load_gguf(name) if name == "smollm2" else load(name)
    for text in random_strings(5, 1000):
        ids = tokenizer.encode(text)
        for skip in (True, False):
            assert tokenizer.decode(ids, skip) == tokenizer.backend.decode(ids, skip_special_tokens=skip)
        normalizer = tokenizer.backend.normalizer
        if not isinstance(normalizer, normalizers.Replace):  # Gemma's mark for spaces in a text is decoded to a space
            assert tokenizer.decode(ids) == (text if normalizer is None else normalizer.normalize_str(text))


@pytest.mark.slow
def test_the_end_sets_of_real_models() -> None:
    assert load("qwen3").eos_token_ids == {151643, 151645}
    assert load("gemma3").eos_token_ids == load_gguf("gemma3").eos_token_ids == {1, 106}
    assert load_gguf("smollm2").eos_token_ids == {0, 2}  # <|endoftext|> ends a text, <|im_end|> a turn
    assert (load("qwen3").eos_token_id, load_gguf("smollm2").eos_token_id) == (151645, 2)
    assert load("llama3_1").eos_token_id in (128001, 128009)
    assert load("llama3_1").eos_token_ids == {128001, 128009}  # this file calls <|eom_id|> reserved


def test_llama3s_end_set_takes_eom_from_the_generation_config(tmp_path: Path) -> None:
    for file in folder("llama3_1").iterdir():
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [128001, 128008, 128009]}')
    assert Tokenizer.from_folder(tmp_path).eos_token_ids == {128001, 128008, 128009}
