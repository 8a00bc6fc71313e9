"""Other requests do not wait while a long text is tokenised."""

import threading
from collections.abc import Callable

import pytest

import infer
from infer.text.tokenizer import Tokenizer

LONG = "The quick brown fox, 12345 jumps over <|im_end|> the lazy dog. " * 12_000
SHORT = "The quick brown fox"
SPELLED = "A <|im_end|> that somebody wrote. " * 200


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return infer.load_tokenizer("smollm2")


def as_control(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text)


def as_text(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, parse_special=False)


@pytest.mark.slow
@pytest.mark.parametrize("encode_short", [as_control, as_text])
@pytest.mark.parametrize("encode_long", [as_control, as_text])
def test_a_short_text_is_tokenised_while_a_long_one_is(
    tokenizer: Tokenizer,
    encode_long: Callable[[Tokenizer, str], list[int]],
    encode_short: Callable[[Tokenizer, str], list[int]],
) -> None:
    num_short, thread = 0, threading.Thread(target=encode_long, args=[tokenizer, LONG])
    thread.start()
    while thread.is_alive():
        encode_short(tokenizer, SHORT)
        num_short += 1
    assert num_short > 20, "one takes a ten-thousandth of the time of the long text"


@pytest.mark.parametrize("text", [LONG[:20_000], SPELLED])
def test_a_long_text_has_the_ids_that_the_library_gives(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.encode(text) == tokenizer.backend.encode(text).ids


def test_a_long_text_has_the_ids_of_its_short_parts(tokenizer: Tokenizer) -> None:
    end = tokenizer.backend.token_to_id("<|im_end|>")
    part = "A <|im_end|> that somebody wrote.\n"
    assert as_control(tokenizer, part * 200) == as_control(tokenizer, part) * 200
    assert as_text(tokenizer, part * 200) == as_text(tokenizer, part) * 200
    assert end in as_control(tokenizer, part)
    assert end not in as_text(tokenizer, part)
