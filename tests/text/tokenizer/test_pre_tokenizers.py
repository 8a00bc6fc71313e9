"""Every pre-tokenizer named in GGUF files cuts as the models' own definitions do, in linear time."""

import json
import random
import unicodedata
from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
import regex
from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers

from extent import usual_or_all
from infer.text.tokenizer import Tokenizer
from infer.text.tokenizer.pre_tokenizers import PRE_TOKENIZERS, PreTokenizer
from test_tokenizer import byte_level_metadata, random_strings

CUTTING = [name for name, rules in PRE_TOKENIZERS.items() if not rules.marks_spaces]
NUM_STRINGS = 300
NUM_LONG = usual_or_all(50_000, 300_000)
HARD = [
    *("", " ", "\n", "a" * 50, "  x", "\t \t x", " \r\n \n x ", "12345678", "a1234567b", "1234567 12x 1_2", "\u3000a "),
    *("a'\u017fb I'LL 'ré", "½²٣٤٥६", "កាន់តែពិសេសអាចខលចេញ", "x\u0301\u0302y \u0301z 1\u0301 !\u0301! \u0301\u0301"),
    "\U0001f636\u200d\U0001f32b\ufe0f (a) 1\ufe0f\u20e3 \u20e3",
]

# Patterns of the models' own tokenizer.json, word for word.
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
JAIS2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s{512}(?!\S)|\s{256}(?!\S)|\s{128}(?!\S)|\s{64}(?!\S)|\s{32}(?!\S)|\s{16}(?!\S)|\s{8}(?!\S)|\s{4}(?!\S)"
    r"|\s{1,2}(?!\S)|\s{1}"
)
DEEPSEEK3 = (
    "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\\r\\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+"
    "| ?[\\p{P}\\p{S}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"
)
QWEN35 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
SPARK = (
    "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\\r\\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+"
    "| ?[\\p{P}\\p{S}]+|[\\r\\n]|\\s+(?!\\S)|\\s+"
)
WORDS = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
BYTES = {**WORDS, "use_regex": False}


def split(pattern: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def digits(individual: bool) -> dict[str, Any]:
    return {"type": "Digits", "individual_digits": individual}


DEFINITIONS: dict[str, list[dict[str, Any]]] = {
    "smollm": [digits(True), WORDS],
    "gpt-2": [WORDS],
    "llama-bpe": [split(LLAMA3), BYTES],
    "qwen2": [split(LLAMA3.replace("{1,3}", "")), BYTES],
    "qwen35": [split(QWEN35), BYTES],
    "ufakzeka": [split(LLAMA3.replace("{1,3}", "").removeprefix("(?i:'s|'t|'re|'ve|'m|'ll|'d)|")), BYTES],
    "spark2_5": [split(r"\p{N}{1,3}"), split("[一-龥぀-ゟ゠-ヿ]+"), split(SPARK), split(r"\p{N}"), BYTES],
    "gpt-4o": [split(O200K), BYTES],
    "tekken": [split(O200K.replace("(?i:'s|'t|'re|'ve|'m|'ll|'d)?", "").replace("{1,3}", "")), BYTES],
    "falcon": [{"type": "Punctuation", "behavior": "Contiguous"}, WORDS, digits(False), split("[0-9][0-9][0-9]")],
    "deepseek-v3": [split(r"\p{N}{1,3}"), split("[一-龥぀-ゟ゠-ヿ]+"), split(DEEPSEEK3), BYTES],
    "deepseek-coder": [*map(split, ("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+")), digits(True), BYTES],
    "jais-2": [split(JAIS2), BYTES],
    "tiny_aya": [split(r"\d{1,3}(?=(?:\d{3})*\b)"), split(O200K), BYTES],
    "viking": [split(r" ?[^(\s|[.,!?…。，、।۔،])]+"), digits(True), BYTES],
}  # fmt: skip
DEEPSEEK_LETTERS = PRE_TOKENIZERS["deepseek-llm"].patterns[1]
DEFINITIONS["deepseek-llm"] = [
    *map(split, ("[\r\n]", DEEPSEEK_LETTERS, r"\s?[!-/:-~！-／：-～‘-‟　-。]+", r"\s+$", "[一-龥ࠀ-一가-퟿]+")),
    digits(True),
    BYTES,
]


def strings() -> list[str]:
    blanks = random.Random(8)
    runs = ["".join(blanks.choices("a1 \t\n\r\u3000.'é", k=blanks.randrange(40))) for _ in range(NUM_STRINGS)]
    numbers = ["".join(blanks.choices("1234567890 ,x_", k=blanks.randrange(20))) for _ in range(NUM_STRINGS)]
    return [*HARD, *runs, *numbers, *random_strings(7, NUM_STRINGS)]


@cache
def cutter(name: str) -> pre_tokenizers.PreTokenizer:
    return PRE_TOKENIZERS[name].make()


@pytest.mark.parametrize("name", DEFINITIONS)
def test_a_name_cuts_as_the_models_own_definition(name: str) -> None:
    backend = Backend(models.BPE())
    saved = json.loads(backend.to_str())
    saved["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": DEFINITIONS[name]}
    expected = Backend.from_str(json.dumps(saved)).pre_tokenizer
    for text in strings():
        assert cutter(name).pre_tokenize_str(text) == expected.pre_tokenize_str(text), text


def is_assigned(character: str) -> bool:
    return unicodedata.category(character) != "Cn"


def cut_by_patterns(patterns: Sequence[str], text: str) -> list[str]:
    """Cut a text with another engine. Each match of a pattern is a piece, and so is the text between two matches."""
    pieces = [text] if text else []
    for pattern in patterns:
        compiled = compile_pattern(pattern)
        cut: list[str] = []
        for piece in pieces:
            end = 0
            for found in compiled.finditer(piece):
                cut += [piece[end : found.start()], found[0]]
                end = found.end()
            cut.append(piece[end:])
        pieces = list(filter(None, cut))
    return pieces


@cache
def compile_pattern(pattern: str) -> Any:
    return regex.compile(pattern.replace(r"\z", r"\Z"), regex.V1)


# Falcon cuts in its alphabet of bytes, and engines disagree about ½. These two are compared with their definitions.
@pytest.mark.slow(cases=14)
@pytest.mark.parametrize("name", sorted(set(CUTTING) - {"falcon", "tiny_aya", "cohere2moe"}))
def test_another_engine_cuts_alike(name: str) -> None:
    """The texts have only characters that are in every version of Unicode used here."""
    rules = PRE_TOKENIZERS[name]
    gpt2 = PRE_TOKENIZERS["default"].patterns[1]
    patterns = [*rules.patterns, *([r"\p{N}"] * rules.individual_digits), *([gpt2] * rules.gpt2_words)]
    for text in ("".join(filter(is_assigned, text)) for text in strings()):
        pieces = [text[start:end] for _, (start, end) in cutter(name).pre_tokenize_str(text)]
        assert pieces == cut_by_patterns(patterns, text), text


def test_digits_are_counted_from_the_right() -> None:
    for name in ("superbpe", "afmoe", "tiny_aya"):
        cuts = {text: [cut for cut, _ in cutter(name).pre_tokenize_str(text)] for text in ("1234567", "12", "123456")}
        assert cuts == {"1234567": ["1", "234", "567"], "12": ["12"], "123456": ["123", "456"]}, name


def test_the_default_pre_tokenizer_cuts_as_llama_cpp() -> None:
    cut = [text for text, _ in cutter("default").pre_tokenize_str("Hi, you  12345!")]
    assert cut == ["Hi", ",", "Ġyou", "Ġ", "Ġ", "123", "45", "!"]


@pytest.mark.slow(cases=42)
@pytest.mark.parametrize("name", CUTTING)
def test_every_pre_tokenizer_keeps_all_text(name: str) -> None:
    tokenizer = Tokenizer.from_gguf(byte_level_metadata(pre=name))
    for text in ("I'LL say: hello  world\r\n\n\t 12345 ½ éa🙂", *HARD, "￥1,234.50%"):
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_letters_and_their_marks_are_composed_as_the_family_does() -> None:
    """llama.cpp's cases of Qwen 3.5, made with its own tokenizer, keep a letter and its mark apart."""
    composed, apart = "r\u00e9sum\u00e9", "re\u0301sume\u0301"
    by_name = {name: Tokenizer.from_gguf(byte_level_metadata(pre=name)) for name in ("qwen2", "qwen35")}
    assert by_name["qwen2"].encode(apart) == by_name["qwen2"].encode(composed)
    assert by_name["qwen35"].decode(by_name["qwen35"].encode(apart)) == apart


def test_an_unknown_pre_tokenizer_gives_one_warning_and_the_default_cuts() -> None:
    with pytest.warns(UserWarning, match=r"\Apre-tokenizer 'klingon' is not known[^\n]*\Z") as said:
        tokenizer = Tokenizer.from_gguf(byte_level_metadata(pre="klingon"))
    assert len(said) == 1
    assert tokenizer.encode("12345") == Tokenizer.from_gguf(byte_level_metadata(pre="default")).encode("12345")


# Linear time. Some pattern could read the characters of each text many times, which would take hours.

# Runs of a character, alone or beside another, and of pairs.
LONG = [*(character * NUM_LONG for character in "aA 1\n四'"), *(run * NUM_LONG + "x" for run in " 1")]
LONG += [*(" " * NUM_LONG + "\u0e01", "a" + "\u0301" * NUM_LONG)]
LONG += [*(" \t" * (NUM_LONG // 2) + "x", "a " * (NUM_LONG // 2))]


@pytest.mark.slow(rest=6)
@pytest.mark.parametrize("rules", sorted(set(PRE_TOKENIZERS.values()) - {PRE_TOKENIZERS["gemma4"]}, key=repr), ids=str)
def test_long_runs_are_cut_in_linear_time(rules: PreTokenizer) -> None:
    for text in LONG:
        pieces = rules.make().pre_tokenize_str(text)
        assert pieces[-1][1][1] == len(text)
