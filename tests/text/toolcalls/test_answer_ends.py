"""Answers may end anywhere: text is shown once, and spaces around reasoning and before calls are not shown."""

import pytest

from infer.text.toolcalls.answer_format import AnswerFormat, Calls
from infer.text.toolcalls.formats import FORMATS, REASONING_FORMATS
from test_tool_formats import TOOLS, parsed

THINK = REASONING_FORMATS[0]
APART, WITHIN = AnswerFormat(None, THINK), AnswerFormat(None, THINK, is_apart=False)
OPEN = AnswerFormat(None, THINK, is_open=True)


@pytest.mark.parametrize("spaces", ["", " ", "\n", " \t\r\n "])
@pytest.mark.parametrize(("form", "opening"), [(APART, "<think>\n "), (OPEN, ""), (OPEN, " \n")])
def test_reasoning_that_is_cut_ends_without_spaces(form: AnswerFormat, opening: str, spaces: str) -> None:
    whole = f"{opening}a  b{spaces}"
    assert parsed(form, [whole]) == parsed(form, whole) == ("", "a  b", ())
    closed = f"{whole}</think>{spaces}"
    assert parsed(form, [closed]) == parsed(form, closed) == ("", "a  b", ())
    assert parsed(form, f"{closed}c{spaces}") == (f"c{spaces}", "a  b", ())


@pytest.mark.parametrize("whole", ["<think> ", "<think>", " <think>\n\n</think> ", "<think> </think>"])
def test_reasoning_of_spaces_alone_is_none(whole: str) -> None:
    assert parsed(APART, [whole]) == parsed(APART, whole) == ("", None, ())


@pytest.mark.parametrize("end", ["", " ", "</thi", " \n</think", "</think>", "</think>\n b "])
def test_reasoning_that_stays_in_the_text_loses_nothing_wherever_it_is_cut(end: str) -> None:
    for beginning in ("<think>", " <think> a", "\n<think>\na \n b"):
        whole = beginning + end
        assert parsed(WITHIN, [whole])[0] == parsed(WITHIN, whole)[0] == whole


@pytest.mark.parametrize("name", [name for name, form in FORMATS.items() if form.trigger])
def test_spaces_before_a_call_are_no_text_and_those_at_the_end_of_a_text_are(name: str) -> None:
    form = AnswerFormat(Calls(FORMATS[name], TOOLS, "auto"))
    trigger = FORMATS[name].trigger
    for spaces in ("", " ", " \n\n", "\t \r\n "):
        assert parsed(form, f"a  b{spaces}") == (f"a  b{spaces}", None, ())
        assert parsed(form, [f"a  b{spaces}{trigger}"]) == parsed(form, f"a  b{spaces}{trigger}") == ("a  b", None, ())
