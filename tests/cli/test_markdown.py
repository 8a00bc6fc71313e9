"""Claims about text at a terminal: no character is lost, words stay whole, pieces do not matter, styles are right."""

import re

from hypothesis import given
from hypothesis import strategies as st

from cases import cases
from infer.cli.streamed_text import MarkdownStyle, WordWrap, display_width

TEXTS = st.text(alphabet="ab1 .*_`#>|-\\~\n\té", max_size=80)


def styled(text: str, sizes: tuple[int, ...] = ()) -> str:
    style = MarkdownStyle()
    shown = ""
    for size in sizes:
        shown += "".join(style.feed(text[:size]))
        text = text[size:]
    return shown + "".join(style.feed(text)) + "".join(style.finish())


def plain(shown: str) -> str:
    return re.sub(r"\x1b\[[\d;]*m", "", shown)


def parts(text: str) -> list[tuple[str, str]]:
    """Return each part of one style, with its SGR parameters."""
    found = re.findall(r"(?:\x1b\[0;?([\d;]*)m)?([^\x1b]*)", styled(text))
    return [(parameters, part) for parameters, part in found if part]


@given(TEXTS)
def test_every_character_is_kept(text: str) -> None:
    assert plain(styled(text)) == text


@given(TEXTS, st.lists(st.integers(1, 9), max_size=20))
def test_pieces_do_not_matter(text: str, sizes: list[int]) -> None:
    assert styled(text, tuple(sizes)) == styled(text)


@given(TEXTS)
def test_a_line_ends_in_the_terminal_s_own_style(text: str) -> None:
    styles = re.findall(r"\x1b\[([\d;]*)m|(\n)", styled(text) + "\n")
    before = "0"
    for parameters, end in styles:
        assert not end or before == "0"
        before = parameters or before


@given(TEXTS, st.integers(8, 30))
def test_styles_take_no_columns(text: str, width: int) -> None:
    bare, wrap = WordWrap(lambda: width), WordWrap(lambda: width)
    expected = bare.feed(text) + bare.finish()
    style = MarkdownStyle()
    shown = wrap.feed(style.feed(text)) + wrap.feed(style.finish()) + wrap.finish()
    assert [line.rstrip() for line in plain(shown).split("\n")] == [line.rstrip() for line in expected.split("\n")]


@cases("text expected",
    ("a **b** c", [("", "a "), ("2", "**"), ("1", "b"), ("2", "**"), ("", " c")]),
    ("## Title\ntext", [("2", "## "), ("1", "Title"), ("", "\ntext")]),
    ("- one\n10. two", [("2", "- "), ("", "one\n"), ("2", "10. "), ("", "two")]),
    ("use `a*b`", [("", "use "), ("2", "`"), ("36", "a*b"), ("2", "`")]),
    ("```python\nx = 1\n```\nend",
     [("2", "```python"), ("", "\n"), ("36", "x = 1"), ("", "\n"), ("2", "```"), ("", "\nend")]),
    ("2 * 3 * 4, a*b*c, snake_case_name", [("", "2 * 3 * 4, a*b*c, snake_case_name")]),
    (r"\*not\*", [("", r"\*not\*")]),
    ("| a |", [("2", "|"), ("", " a "), ("2", "|")]),
    ("***both***", [("2", "***"), ("1;3", "both"), ("2", "***")]),
    ("**open\nnext", [("2", "**"), ("1", "open"), ("", "\nnext")]),
)  # fmt: skip
def test_marks_are_dim_and_what_they_mark_is_styled(text: str, expected: list[tuple[str, str]]) -> None:
    assert parts(text) == expected


# Wrapping


WIDE_TEXTS = st.text(alphabet="ab-深い é\u0301\t\n`|👩\u200d\ufe0f", max_size=80)


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


@given(WIDE_TEXTS, st.integers(1, 12), st.lists(st.integers(1, 9), max_size=20))
def test_pieces_do_not_matter_for_wrapping(text: str, width: int, sizes: list[int]) -> None:
    assert wrapped(text, width, tuple(sizes)) == wrapped(text, width)


@given(WIDE_TEXTS, st.integers(8, 30))
def test_nothing_but_spaces_is_lost_and_lines_fit(text: str, width: int) -> None:
    shown = wrapped(text, width)
    assert "".join(shown.split()) == "".join(text.split())
    if "`" in text or "|" in text or "\t" in text:
        return
    for line in shown.split("\n"):
        assert display_width(line) <= width or " " not in line.strip()


@given(WIDE_TEXTS)
def test_a_text_that_fits_keeps_its_lines(text: str) -> None:
    lines = [line.rstrip() for line in wrapped(text, 1000).split("\n")]
    assert lines == [line.rstrip() for line in text.split("\n")]


def test_a_word_waits_only_while_it_may_still_go_to_the_next_line() -> None:
    wrap = WordWrap(lambda: 11)
    shown = [wrap.feed(piece) for piece in ("Hel", "lo", " wor", "ld", "wide", "ly", " an", "d", " so")]
    assert (shown, wrap.finish()) == (["Hel", "lo", "", "", "\nworldwide", "ly", "\nan", "d", ""], " so")


def test_a_window_that_becomes_narrow_is_noticed_at_the_next_word() -> None:
    widths = [40]
    wrap = WordWrap(lambda: widths[0])
    shown = wrap.feed("some words of a line ")
    widths[0] = 24
    assert shown + wrap.feed("that goes on") + wrap.finish() == "some words of a line\nthat goes on"
