"""Claims about Markdown at a terminal: no character is lost or moved, pieces do not matter, and styles are right."""

import re

from hypothesis import given
from hypothesis import strategies as st

from cases import cases
from infer.cli.terminal.markdown import MarkdownStyle
from infer.cli.terminal.wrapping import WordWrap, display_width

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


def test_a_word_that_is_styled_goes_to_the_next_line_with_its_style() -> None:
    wrap, style = WordWrap(lambda: 12), MarkdownStyle()
    shown = wrap.feed(style.feed("some words **bold**")) + wrap.feed(style.finish()) + wrap.finish()
    assert plain(shown) == "some words\n**bold**"
    assert display_width(shown.split("\n")[1]) == 8
