"""Vocabularies in GGUF's dialect give the ids of the models' own tokenizer.json, for any text.

`INFER_RANDOM_STRINGS=1000000` makes a longer run: a minute or two for each vocabulary.
"""

import json
import os
import random
from collections.abc import Callable, Iterator
from functools import cache
from itertools import islice
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from assets import asset
from extent import usual_or_all
from infer import Tokenizer
from infer.text.tokenizer.gguf_vocabulary import TokenType
from test_detokenizer import streamed
from test_tokenizer import FRAGMENTS, SCRIPTS, as_gguf, gguf_keys, gguf_metadata, load, load_gguf

NUM_STRINGS = int(os.environ.get("INFER_RANDOM_STRINGS", usual_or_all(1000, 20_000)))
EVERY = usual_or_all(3, 1)  # every third word of a vocabulary, or every word
NUM_STREAMS = usual_or_all(4000, 100_000)
BATCH = 1000
pytestmark = pytest.mark.slow

SKIN_TONES = [chr(code) for code in range(0x1F3FB, 0x1F400)]
PEOPLE = ["👩", "👨", "🧑", "👧", "👍", "👋", "🤦", "🏃"]
BLANKS = " \t\n\r\v\f\xa0\u2003\u2028\u3000\u200b\ufeff"
CODE = [*"{}`", "();", "==", "!=", "->", "::", "//", "/*", "0x1F", "_a", "$x", "\\n", "#!", "return ", "\n\t", "\n    "]


def random_strings(seed: int, count: int, words: list[str]) -> Iterator[str]:
    """Yield words of the vocabulary, scripts, emoji sequences, blanks, digits, code and fragments, in random order."""
    generator = random.Random(seed)
    choose = generator.choice

    def emoji() -> str:
        person = choose(PEOPLE) + choose(["", choose(SKIN_TONES)])
        flag = chr(generator.randrange(0x1F1E6, 0x1F200)) + chr(generator.randrange(0x1F1E6, 0x1F200))
        return choose([person, flag, f"{person}\u200d{choose(PEOPLE)}", "❤\ufe0f", "1\ufe0f\u20e3", "\u200d", "\ufe0f"])

    def script() -> str:
        characters = choose(SCRIPTS)
        return "".join(chr(choose(characters)) for _ in range(generator.randrange(1, 8)))

    kinds: list[Callable[[], str]] = [
        *(lambda: choose(words), lambda: choose(words), lambda: choose(FRAGMENTS), script, script, emoji),
        lambda: "".join(generator.choices(BLANKS, k=generator.randrange(1, 9))),
        lambda: "".join(generator.choices("0123456789", k=generator.randrange(1, 9))),
        lambda: choose(CODE),
        lambda: chr(choose([generator.randrange(0xD800), generator.randrange(0xE000, 0x110000)])),
    ]
    for _ in range(count):
        yield "".join(choose(kinds)() for _ in range(generator.randrange(1, 10)))


def naughty_strings() -> list[str]:
    path = asset("naughty_strings/blns.json")
    others = ["\0", "a\0b", "\ufeff", "\u202e", "\ud7ff\ue000", "\U0010ffff"]
    return [*json.loads(path.read_text(encoding="utf-8")), *others]


def llama2_metadata() -> dict[str, Any]:
    """Return metadata as SentencePiece writes it: two tokens are merged earlier if their result has a better score."""
    metadata = as_gguf("llama2", "")
    tokens, merges = (metadata[f"tokenizer.ggml.{name}"] for name in ("tokens", "merges"))
    scores = {merge.replace(" ", ""): -float(rank) for rank, merge in reversed(list(enumerate(merges)))}
    kinds = [TokenType.UNKNOWN, TokenType.CONTROL, TokenType.CONTROL, *[TokenType.BYTE] * 256]
    types = list(map(int, kinds)) + [1] * (len(tokens) - 259)
    metadata |= gguf_keys(model="llama", token_type=types, unknown_token_id=0, bos_token_id=1)
    return metadata | gguf_keys(scores=[scores.get(token, 0.0) for token in tokens])


def smollm2_definition() -> Tokenizer:
    metadata = gguf_metadata("smollm2")
    vocabulary = {text: token_id for token_id, text in enumerate(metadata["tokenizer.ggml.tokens"])}
    backend = Backend(models.BPE(vocabulary, [tuple(m.split(" ")) for m in metadata["tokenizer.ggml.merges"]]))
    digits, words = pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([digits, words])
    backend.decoder = decoders.ByteLevel()
    kinds = zip(vocabulary, metadata["tokenizer.ggml.token_type"], strict=True)
    backend.add_special_tokens([text for text, kind in kinds if kind == TokenType.CONTROL])
    return Tokenizer(backend, named_tokens={})


def marked(name: str) -> dict[str, Any]:
    return as_gguf(name, "") | gguf_keys(model="gemma4", unknown_token_id=3)


PRES = (("llama3_1", "llama-bpe"), ("qwen3", "qwen2"), ("gptoss", "gpt-4o"), ("deepseek_v3", "deepseek-v3"))
PAIRS: dict[str, Callable[[], tuple[Tokenizer, Tokenizer]]] = {
    **{name: lambda name=name, pre=pre: (Tokenizer.from_gguf(as_gguf(name, pre)), load(name)) for name, pre in PRES},
    "llama2": lambda: (Tokenizer.from_gguf(llama2_metadata()), load("llama2")),
    "gemma3": lambda: (load_gguf("gemma3"), load("gemma3")),
    "gemma3 as gemma4": lambda: (Tokenizer.from_gguf(marked("gemma3")), load("gemma3")),
    "smollm2": lambda: (load_gguf("smollm2"), smollm2_definition()),
}


@cache
def pair(name: str) -> tuple[Tokenizer, Tokenizer]:
    return PAIRS[name]()


@cache
def vocabulary_words(name: str) -> list[str]:
    ours, expected = pair(name)
    texts = {text.decode("utf-8", "ignore") for text in expected.token_bytes[: ours.vocab_size]}
    return sorted(texts - {""})


def assert_equal(name: str, texts: list[str]) -> None:
    ours, expected = (tokenizer.backend.encode_batch_fast(texts, add_special_tokens=False) for tokenizer in pair(name))
    for own, other, text in zip(ours, expected, texts, strict=True):
        assert own.ids == other.ids, text


@pytest.mark.slow(rest=2)
@pytest.mark.parametrize("name", PAIRS)
def test_naughty_and_random_strings_give_the_same_ids(name: str) -> None:
    strings = naughty_strings()
    assert_equal(name, [*strings, *(f"a {text} b" for text in strings), "\n".join(strings)])
    texts = random_strings(NUM_STRINGS, NUM_STRINGS, vocabulary_words(name))
    while batch := list(islice(texts, BATCH)):
        assert_equal(name, batch)


@pytest.mark.slow(rest=2)
@pytest.mark.parametrize("name", PAIRS)
def test_the_words_of_the_vocabulary_give_the_same_ids(name: str) -> None:
    """A third of the words are encoded, or with INFER_TESTS=all each word."""
    assert_equal(name, vocabulary_words(name)[::EVERY])
    ours, expected = pair(name)
    if name in ("llama3_1", "qwen3"):
        assert ours.special_token_ids == expected.special_token_ids
    size = min(ours.vocab_size, expected.vocab_size)
    assert ours.token_bytes[:size] == expected.token_bytes[:size]


@pytest.mark.parametrize("name", ["llama3_1", "qwen3", "gemma3", "llama2"])
def test_random_ids_stream_to_their_decoded_text(name: str) -> None:
    """Texts include broken characters, because most ids of a byte alone are not a character."""
    tokenizer = load(name)
    generator = random.Random(name)
    control, size = tokenizer.special_token_ids, tokenizer.vocab_size
    byte_ids = [token_id for token_id, text in enumerate(tokenizer.token_bytes) if len(text) == 1]
    for _ in range(NUM_STREAMS // 4):
        ids = [generator.choice(byte_ids) if generator.random() < 0.5 else generator.randrange(size) for _ in range(9)]
        kept = b"".join(tokenizer.token_bytes[token_id] for token_id in ids if token_id not in control)
        expected = kept.decode("utf-8", "replace")
        if name == "llama2":
            expected = expected.removeprefix(" ")
        assert streamed(tokenizer.make_detokenizer(), ids) == tokenizer.decode(ids) == expected


def test_a_conversation_in_llama2s_words_decodes_to_itself() -> None:
    ours = pair("llama2")[0]
    for text in ("Hello", " Hello", "  two", "a\n b", "🙂", "", "\u2581"):
        assert ours.decode(ours.encode(text)) == text.replace("\u2581", " ")
