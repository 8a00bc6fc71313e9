"""Stop strings, compared with a naive search of the whole text, for every way to cut the text."""

from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from infer.errors import InvalidRequestError
from infer.text.tokenizer import StopStrings

SMALL_ALPHABET = st.text(alphabet="ab\n ", max_size=24)
STOPS = st.lists(st.text(alphabet="ab\n ", min_size=1, max_size=5), max_size=4)


def naive(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """Return the match that ends first. If several end there, it is the longest one."""
    ends = [(end, stop) for end in range(len(text) + 1) for stop in stops if text[:end].endswith(stop)]
    if not ends:
        return text, None
    end, stop = min(ends, key=lambda match: (match[0], -len(match[1])))
    return text[: end if include else end - len(stop)], stop


def run(pieces: list[str], stops: list[str], include: bool) -> tuple[list[str], str | None]:
    matcher = StopStrings(stops, include)
    shown = [matcher.push(piece).text for piece in pieces]
    return [*shown, matcher.flush()], matcher.matched


@st.composite
def cut_texts(draw: st.DrawFn) -> list[str]:
    text = draw(SMALL_ALPHABET)
    cuts = sorted(draw(st.lists(st.integers(0, len(text)), max_size=8)))
    return [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]


@given(cut_texts(), STOPS, st.booleans())
@example(["ab", "a"], ["aba", "ba"], False)
@example(["a long stop", "more"], ["long stop", "st"], False)
@example(["he", "l", "l", "o!"], ["ello"], True)
def test_any_split_of_a_text_gives_the_result_for_the_whole(pieces: list[str], stops: list[str], include: bool) -> None:
    shown, matched = run(pieces, stops, include)
    assert ("".join(shown), matched) == naive("".join(pieces), stops, include)


@given(cut_texts(), STOPS)
def test_no_part_of_a_stop_string_is_ever_shown(pieces: list[str], stops: list[str]) -> None:
    matcher = StopStrings(stops)
    text, shown = "", ""
    for piece in pieces:
        text += piece
        shown += matcher.push(piece).text
        expected, matched = naive(text, stops, include=False)
        assert expected.startswith(shown)
        if matched is None:
            held = text[len(shown) :]
            assert not held or any(stop.startswith(held) and stop != held for stop in stops)
            assert not any(
                shown.endswith(stop[:length]) and stop.startswith(shown[-length:] + held)
                for stop in stops
                for length in range(1, min(len(stop), len(shown) + 1))
            )


def test_text_without_stops_passes_at_once() -> None:
    assert StopStrings([]).push("anything") == ("anything", None)


def test_flush_returns_the_held_text() -> None:
    matcher = StopStrings(["<|end|>"])
    assert (matcher.push("a <|en").text, matcher.flush()) == ("a ", "<|en")


def test_one_string_is_a_list_of_one() -> None:
    assert StopStrings("stop").push("a stop b") == ("a ", "stop")


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="not empty"):
        StopStrings(["a", ""])


def test_long_stop_strings_cost_linear_time() -> None:
    matcher = StopStrings(["a" * 8_000 + "b"])
    shown = sum(len(matcher.push("aaaa").text) for _ in range(8_000))
    assert shown + len(matcher.flush()) == 32_000


def test_a_stop_string_is_looked_at_only_as_far_as_a_text_agrees_with_it() -> None:
    """Their number and lengths do not matter. Work is counted in states, one per prefix that a text reached."""
    stops = [f"{'ab' * 500}{index:04}" for index in range(3000)]
    matcher = StopStrings(stops)
    for _ in range(100):
        matcher.push("abcab")
    assert count_states(matcher._automaton.root) <= 4
    assert matcher.push("ab" * 499 + "2999").matched == stops[-1]


def test_nested_stop_strings_of_thousands_of_characters_are_no_recursion() -> None:
    stops = ["a" * length + "b" for length in range(1, 3000)]
    matcher = StopStrings([*stops, "a" * 3000 + "c"])
    assert matcher.push("a" * 5000 + "b") == ("a" * (5000 - 2999), stops[-1])


def count_states(state: Any) -> int:
    return sum(1 + count_states(longer) for longer in state.after.values() if longer is not None)
