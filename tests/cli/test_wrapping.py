"""Claims about wrapped text: words stay whole, nothing is lost, and pieces do not matter."""

from hypothesis import given
from hypothesis import strategies as st

from cases import cases
from infer.cli.terminal.wrapping import WordWrap, display_width

TEXTS = st.text(alphabet="ab-深い é\u0301\t\n`|👩\u200d\ufe0f", max_size=80)


def wrapped(text: str, width: int = 20, sizes: tuple[int, ...] = ()) -> str:
    wrap = WordWrap(lambda: width)
    shown = ""
    for size in sizes:
        shown += wrap.feed(text[:size])
        text = text[size:]
    return shown + wrap.feed(text) + wrap.finish()


@cases("text shown",
    ("The capital of France is Paris.", "The capital of\nFrance is Paris."),
    ("exactly twenty signs and more", "exactly twenty signs\nand more"),
    ("one\n\n  two  three", "one\n\n  two  three"),
    ("see https://example.org/a/long/path there", "see\nhttps://example.org/a/long/path there"),
    ("深い森の中で、静かに歩く人がいた", "深い森の中で、静かに\n歩く人がいた"),
    ("a line that is long\n```\nx = some_function(1, 2, 3)\n```\nthen words once more here",
     "a line that is long\n```\nx = some_function(1, 2, 3)\n```\nthen words once more\nhere"),
    ("| a | table of many columns |", "| a | table of many columns |"),
    ("ten columns \t\t\tmore", "ten columns\nmore"),
    ("bread\xa0and\xa0butter is fine", "bread\xa0and\xa0butter is\nfine"),
)  # fmt: skip
def test_words_go_to_the_next_line_whole(text: str, shown: str) -> None:
    assert wrapped(text) == shown


@given(TEXTS, st.integers(1, 12), st.lists(st.integers(1, 9), max_size=20))
def test_pieces_do_not_matter(text: str, width: int, sizes: list[int]) -> None:
    assert wrapped(text, width, tuple(sizes)) == wrapped(text, width)


@given(TEXTS, st.integers(8, 30))
def test_nothing_but_spaces_is_lost_and_lines_fit(text: str, width: int) -> None:
    shown = wrapped(text, width)
    assert "".join(shown.split()) == "".join(text.split())
    if "`" in text or "|" in text or "\t" in text:
        return
    for line in shown.split("\n"):
        assert display_width(line) <= width or " " not in line.strip()


@given(TEXTS)
def test_a_text_that_fits_keeps_its_lines(text: str) -> None:
    lines = [line.rstrip() for line in wrapped(text, 1000).split("\n")]
    assert lines == [line.rstrip() for line in text.split("\n")]


def test_a_word_waits_only_while_it_may_still_go_to_the_next_line() -> None:
    wrap = WordWrap(lambda: 11)
    shown = [wrap.feed(piece) for piece in ("Hel", "lo", " wor", "ld", "wide", "ly", " an", "d", " so")]
    assert shown == ["Hel", "lo", "", "", "\nworldwide", "ly", "\nan", "d", ""]
    assert wrap.finish() == " so"


def test_a_window_that_becomes_narrow_is_noticed_at_the_next_word() -> None:
    widths = [40]
    wrap = WordWrap(lambda: widths[0])
    shown = wrap.feed("some words of a line ")
    widths[0] = 24
    assert shown + wrap.feed("that goes on") + wrap.finish() == "some words of a line\nthat goes on"
