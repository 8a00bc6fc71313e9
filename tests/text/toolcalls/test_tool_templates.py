"""The tool format that a chat template writes, and conversations with calls in the form that it expects."""

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from infer.errors import InvalidRequestError
from infer.text.templates.chat_template import ChatTemplate
from infer.text.toolcalls.answer_format import TemplateFormats, probe_template, reasoning_of, written_arguments
from infer.text.toolcalls.formats import FORMATS, HEADED, pattern_of
from infer.text.toolcalls.messages import shown_messages, shown_tools
from infer.text.toolcalls.tools import Tool, read_tools
from refusals import check_refused
from tool_templates import ALTERNATING, LFM2_LISTS, LFM25_CALLS, QWEN35, TEMPLATES, TOOLS_ALONE

PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
TOOLS = read_tools([{"name": "get_weather", "description": "Of a city.", "parameters": PARAMETERS}])
FUNCTION = {"name": "get_weather", "arguments": '{"city": "Paris", "days": 3}'}
CALL = {"id": "abcdefghi", "type": "function", "function": FUNCTION}
MESSAGES = [{"role": "user", "content": "weather?"}, {"role": "assistant", "content": "", "tool_calls": [CALL]}]
MESSAGES += [{"role": "tool", "tool_call_id": "abcdefghi", "content": "rain"}]


def probed(source: str, name: str | None = None) -> TemplateFormats:
    template = ChatTemplate(source, {})

    def render(messages: Sequence[Mapping[str, Any]], tools: Any) -> str:
        return template.render(messages, tools=tools, add_generation_prompt=False)

    return probe_template(render, source, name)


def shown_parts(formats: TemplateFormats) -> tuple[bool, bool, bool]:
    return formats.shows_tools, formats.shows_calls, formats.shows_results


def rendered(source: str, formats: TemplateFormats, tools: tuple[Tool, ...] = TOOLS) -> str:
    shown = shown_messages(MESSAGES, tools, formats)
    return ChatTemplate(source, {}).render(shown, tools=shown_tools(tools, formats) or None)


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_format_is_the_one_that_the_template_writes(name: str) -> None:
    formats = probed(TEMPLATES[name])
    assert formats.calls is FORMATS[name]
    assert formats.takes_plain_tools == (name == "apertus")
    text = rendered(TEMPLATES[name], formats)
    form = formats.calls
    assert pattern_of(form.start + "get_weather" + form.before_arguments).search(text)
    arguments = written_arguments(form, TOOLS[0], {"city": "Paris", "days": 3})
    assert [part for part in ("Of a city.", arguments, "rain") if part not in text] == []
    if name != HEADED:
        assert probed(TEMPLATES[name], "hermes").calls is FORMATS["hermes"]


def test_parts_that_a_template_does_not_show_are_written_as_text() -> None:
    formats = probed(ALTERNATING)
    assert (formats.calls.name, shown_parts(formats)) == ("json", (False, False, False))
    shown = shown_messages([*MESSAGES, MESSAGES[2]], (), formats)
    assert [message["role"] for message in shown] == ["user", "assistant", "user"]
    twice = shown_messages([*MESSAGES, *[MESSAGES[2], *MESSAGES[1:3]] * 2], (), formats)
    assert [message["role"] for message in twice] == ["user", *["assistant", "user"] * 3]
    assert shown[1]["content"] == '{"name": "get_weather", "arguments": {"city": "Paris", "days": 3}}'
    assert shown[2]["content"] == "Result of get_weather: rain\n" * 2 + "Now answer with this, in words."
    assert "tool_calls" not in shown[1]
    (system, *others) = shown_messages(MESSAGES, TOOLS, formats)
    assert system["role"] == "system"
    assert "Of a city." in system["content"]
    assert len(others) == 3


def test_a_call_that_a_template_writes_in_a_way_of_its_own_wants_a_name() -> None:
    calls = "{% for call in message.tool_calls or [] %}!{{ call.function.name }}!{% endfor %}"
    source = f"{{{{ tools | tojson }}}}{{% for message in messages %}}{{{{ message.content }}}}{calls}{{% endfor %}}"
    check_refused(lambda: probed(source), "an unknown format: set tool_format to one of hermes")
    assert probed(source, "pythonic").calls.name == "pythonic"
    check_refused(lambda: probed(source, "x"), "tool_format must be one of")


@pytest.mark.parametrize("sign", LFM2_LISTS)
def test_a_template_that_only_lists_tools_is_known_by_the_list(sign: str) -> None:
    source = LFM2_LISTS[sign]
    formats = probed(source)
    assert (formats.calls.name, formats.shows_tools, formats.shows_calls) == ("lfm2", True, False)
    text = rendered(source, formats)
    assert sign in text
    assert '<|tool_call_start|>[get_weather(city="Paris", days=3)]<|tool_call_end|>' in text
    unsigned = probed(source.replace(sign, "Tools: "))
    assert (unsigned.calls.name, unsigned.shows_tools, unsigned.shows_calls) == ("json", True, False)


def test_a_template_that_writes_texts_in_single_quotes_shows_the_calls_itself() -> None:
    formats = probed(LFM25_CALLS)
    assert (formats.calls.name, formats.shows_calls) == ("lfm2", True)
    call = "<|tool_call_start|>[get_weather(city='Paris', days=3)]<|tool_call_end|>"
    assert call in rendered(LFM25_CALLS, formats)


def test_qwen3_5_s_template_writes_calls_as_qwen3_coder_s_and_refuses_a_chat_without_a_question() -> None:
    formats = probed(QWEN35)
    assert (formats.calls.name, shown_parts(formats)) == ("qwen3-coder", (True, True, True))
    text = rendered(QWEN35, formats)
    assert "<think>\n\n</think>\n\n<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>" in text
    assert text.endswith("rain\n</tool_response><|im_end|>\n<|im_start|>assistant\n<think>\n")


def test_a_template_that_works_only_with_tools_is_accepted() -> None:
    source = "{% for tool in tools %}{{ tool.function.name }}{% endfor %}{{ messages[0].content }}"
    with pytest.raises(InvalidRequestError):
        ChatTemplate(source, {}).render([MESSAGES[0]])
    ChatTemplate(source, {}).check()
    with pytest.raises(InvalidRequestError):
        ChatTemplate(TOOLS_ALONE, {}).check()


def test_reasoning_is_known_by_its_tags() -> None:
    assert reasoning_of("{{ '<think>' }}{% if x %}</think>{% endif %}").opening == "<think>"  # type: ignore[union-attr]
    assert reasoning_of("[THINK][/THINK]").closing == "[/THINK]"  # type: ignore[union-attr]
    assert reasoning_of("<think>") is None
