"""Streamed text equals decoded text, and both are the bytes of the tokens."""

import random
import sys
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Regex, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from infer.errors import InvalidRequestError, UnsupportedModelError
from infer.text.tokenizer import Detokenizer, Tokenizer
from infer.text.tokenizer.decoding_rules import make_token_bytes, read_decoding_rules
from infer.text.tokenizer.detokenizer import Replacement

ANY_BYTES = tuple(bytes([value]) for value in range(256))


def make_byte_level_tokenizer() -> Tokenizer:
    """Return a vocabulary of the 256 bytes, a word and a special token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {character: token_id for token_id, character in enumerate(alphabet)}
    vocabulary["Ġhello"] = 256
    backend = Backend(models.BPE(vocabulary, []))
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|é|>"])
    return Tokenizer(backend, named_tokens={})


def make_sentencepiece_tokenizer(strip: bool) -> Tokenizer:
    vocabulary = {"<unk>": 0} | {f"<0x{value:02X}>": value + 1 for value in range(256)}
    for text in ("▁", "▁Hello", "a", "▁▁", "é", "<0xZZ>"):
        vocabulary[text] = len(vocabulary)
    backend = Backend(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if strip else steps)
    return Tokenizer(backend, named_tokens={})


def streamed(detokenizer: Detokenizer, ids: Iterable[int]) -> str:
    return "".join([*map(detokenizer.push, ids), detokenizer.flush()])


@given(st.lists(st.integers(0, 255)))
def test_every_sequence_of_bytes_streams_to_its_decoded_text(ids: list[int]) -> None:
    assert streamed(Detokenizer(ANY_BYTES), ids) == bytes(ids).decode("utf-8", "replace")


@pytest.mark.slow
@given(st.text())
def test_text_cut_into_bytes_comes_back_whole_and_never_shows_half_a_character(text: str) -> None:
    detokenizer = Detokenizer(ANY_BYTES)
    pieces = [detokenizer.push(byte) for byte in text.encode()]
    assert "".join(pieces) == text
    assert all(len(piece) <= 1 for piece in pieces)


def test_a_token_costs_the_same_however_long_the_text() -> None:
    """Each token reads only its own bytes, and the state does not grow."""

    class Counted(tuple[bytes, ...]):
        num_read = 0

        def __getitem__(self, index: Any) -> Any:
            type(self).num_read += 1
            return super().__getitem__(index)

    detokenizer, sizes = Detokenizer(Counted(ANY_BYTES)), []
    Counted.num_read = 0  # the type checker has read one
    for _ in range(2):
        for _ in range(5000):
            detokenizer.push(97)
        sizes.append(sum(map(sys.getsizeof, (*vars(detokenizer).values(), *detokenizer._decoder.getstate()))))
    assert Counted.num_read == 10_000
    assert sizes[0] == sizes[1]


def test_an_id_outside_the_vocabulary_is_refused() -> None:
    for token_id in (-1, 256):
        with pytest.raises(InvalidRequestError, match=r"\[0, 256\)"):
            Detokenizer(ANY_BYTES).push(token_id)
        with pytest.raises(InvalidRequestError, match=r"\[0, "):
            make_byte_level_tokenizer().decode([1, token_id * 2, 1])


def test_byte_level_tokens_are_bytes_and_special_tokens_their_text() -> None:
    tokenizer = make_byte_level_tokenizer()
    assert sorted(tokenizer.token_bytes[:256]) == list(ANY_BYTES)
    assert tokenizer.token_bytes[256:] == (b" hello", "<|é|>".encode())


@pytest.mark.parametrize("strip", [False, True])
def test_sentencepiece_marks_are_spaces_and_byte_tokens_bytes(strip: bool) -> None:
    tokenizer = make_sentencepiece_tokenizer(strip)
    vocabulary = tokenizer.backend.get_vocab()
    ids = [vocabulary[text] for text in ("▁Hello", "<0xC3>", "<0xA9>", "<0x0A>", "▁▁", "a", "<0xZZ>")]
    assert tokenizer.decode(ids) == (" Hello" if not strip else "Hello") + "é\n  a<0xZZ>"
    assert tokenizer.decode(ids) == tokenizer.backend.decode(ids)


@pytest.mark.parametrize("strip", [None, False, True])
def test_streaming_equals_decoding_for_random_ids(strip: bool | None) -> None:
    tokenizer = make_byte_level_tokenizer() if strip is None else make_sentencepiece_tokenizer(strip)
    generator = random.Random(0)
    for _ in range(1000):
        ids = generator.choices(range(tokenizer.vocab_size), k=generator.randrange(20))
        for skip in (False, True):
            kept = [i for i in ids if not (skip and i in tokenizer.special_token_ids)]
            text = b"".join(tokenizer.token_bytes[i] for i in kept).decode("utf-8", "replace")
            expected = text[1:] if strip and text[:1] == " " else text
            assert streamed(tokenizer.make_detokenizer(skip), ids) == tokenizer.decode(ids, skip) == expected


PIECES = [*(f"<0x{value:02X}>" for value in range(128)), "▁", "▁▁", "\n", "'", "s", "Hello", "▁Hello", "##a", "##"]
PIECES += ["a", "aa", " ", "  ", "' s", " .", "n't", "é", "a▁b", "b", "\0infer\0", "<0xZZ>"]
STRINGS = st.sampled_from(["▁", " ", "a", "aa", "aab", "\n ", "' ", "ab", "▁▁", "Hello "])
STEPS = st.one_of(
    st.builds(decoders.Fuse),
    st.builds(decoders.ByteFallback),
    st.builds(decoders.ByteLevel),
    st.builds(decoders.Metaspace, st.just("▁"), st.sampled_from(["always", "never", "first"])),
    st.builds(decoders.Strip, st.sampled_from([" ", "▁", "a"]), st.integers(0, 3), st.sampled_from([0, 0, 0, 1])),
    st.builds(decoders.Replace, STRINGS, st.sampled_from(["", " ", "a", "▁", "xx"])),
    st.builds(decoders.Replace, st.builds(Regex, st.sampled_from(["▁+", " +", "a|s"])), st.sampled_from(["", " "])),
    st.builds(decoders.WordPiece, st.just("##"), st.booleans()),
)


@given(st.lists(STEPS, max_size=5), st.lists(st.lists(st.sampled_from(PIECES), max_size=7), min_size=5, max_size=5))
@example([decoders.ByteLevel()], [["é"]])  # a byte that begins a character
@example([decoders.Fuse(), decoders.Replace("ab", "x")], [["a", "b"]])  # a text of several tokens
def test_any_steps_of_a_decoder_give_the_librarys_text_or_are_refused_at_load(
    steps: list[decoders.Decoder], texts: list[list[str]]
) -> None:
    vocabulary = {text: token_id for token_id, text in enumerate(PIECES)}
    backend = Backend(models.BPE(vocabulary, [], unk_token="a", byte_fallback=True))
    backend.decoder = decoders.Sequence(steps)
    try:
        tokenizer = Tokenizer(backend, named_tokens={})
    except UnsupportedModelError:
        return
    for text in texts:
        ids = [vocabulary[piece] for piece in text]
        assert streamed(tokenizer.make_detokenizer(), ids) == tokenizer.decode(ids) == backend.decode(ids)
        for cut in range(len(ids)):
            answer = streamed(tokenizer.make_detokenizer(prompt_ids=ids[:cut]), ids[cut:])
            if not any(isinstance(rule, Replacement) for rule in tokenizer._rules.of_text):
                spelled = b"".join(tokenizer.token_bytes[each] for each in ids[cut:])
                assert answer == spelled.decode("utf-8", "replace")


@pytest.mark.parametrize("middle", [[], [decoders.Fuse()]])
def test_the_usual_decoders_are_not_refused(middle: list[decoders.Decoder]) -> None:
    lucie = [decoders.ByteFallback(), decoders.Metaspace(), decoders.Fuse(), decoders.Replace("\n ", "\n")]
    llama = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *middle, decoders.Strip(" ", 1, 0)]
    for steps in (lucie, llama, [decoders.ByteLevel()], [decoders.WordPiece("##", True)], [decoders.Metaspace()]):
        assert read_decoding_rules(decoders.Sequence(steps)).rewrites_text == (steps is lucie)


def test_an_unknown_decoder_is_named() -> None:
    with pytest.raises(UnsupportedModelError, match="'CTC'"):
        read_decoding_rules(decoders.CTC())


def test_a_tokenizer_without_decoder_writes_its_tokens() -> None:
    assert make_token_bytes(["a", "é"], read_decoding_rules(None), ()) == (b"a", "é".encode())
