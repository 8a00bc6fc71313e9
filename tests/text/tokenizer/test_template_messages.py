"""Each template gets contents in the form that it shows, and system messages where it takes them."""

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from cases import cases
from infer.text.templates.chat_template import ChatTemplate
from refusals import check_refused

LOOP = (
    "{% for m in messages %}{{ m.role }}: {% for part in m.content | selectattr('type', 'equalto', 'text') %}"
    "{{ part.text }}{% endfor %}{{ '\\n' }}{% endfor %}"
)
FIRST = "{% for m in messages %}{{ m.role }}: {{ m.content[0]['text'] }}\n{% endfor %}"
TEXT = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
JOINED = "{% for m in messages %}{{ m.role + ': ' + m.content | trim + '\n' }}{% endfor %}"
BOTH = (
    "{% for m in messages %}{{ m.role }}: {% if m.content is string %}{{ m.content | trim }}{% else %}"
    "{% for part in m.content %}{{ part.text | trim }}{% endfor %}{% endif %}{{ '\\n' }}{% endfor %}"
)
KEYS = (
    "{% for m in messages %}{% if m.content is string %}{{ raise_exception('a list') }}{% endif %}"
    "{{ m.content[0].source_lang_code }}: {{ m.content[0].text }}{% endfor %}"
)
STRICT = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('first') }}{% endif %}"
    "{{ m.role }}: {{ m.content }}\n{% endfor %}"
)
FORGETFUL = (
    "{% if messages[0].role == 'system' %}system: {{ messages[0].content }}\n{% endif %}"
    "{% for m in messages if m.role != 'system' %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
)


def turn(role: str, *texts: str) -> dict[str, Any]:
    """Return a message with one text, or with a part for each text."""
    parts = [{"type": "text", "text": text} for text in texts]
    return {"role": role, "content": texts[0] if len(texts) == 1 else parts}


def rendered(template: str, messages: Sequence[Mapping[str, Any]], **variables: Any) -> str:
    return ChatTemplate(template, {}).render(messages, True, **variables)


@pytest.mark.parametrize("template", [LOOP, FIRST, TEXT, JOINED, BOTH])
def test_contents_as_texts_and_as_parts_give_the_same_prompt(template: str) -> None:
    texts = {"system": "Be brief.", "user": "Is it safe?", "assistant": "It is."}
    whole = "".join(f"{role}: {text}\n" for role, text in texts.items()) + "user: a\n"
    as_parts = [{"role": role, "content": [{"type": "text", "text": text}]} for role, text in texts.items()]
    assert rendered(template, [*(turn(role, text) for role, text in texts.items()), turn("user", "a")]) == whole
    assert rendered(template, [*as_parts, turn("user", "a")]) == whole


def test_several_parts_are_joined_for_a_template_that_reads_texts() -> None:
    messages = [turn("user", "a ", "b")]
    assert rendered(TEXT, messages) == rendered(LOOP, messages) == "user: a b\n"
    assert rendered(BOTH, messages) == "user: ab\n", "transformers gives such a template its parts"


def test_parts_keep_their_own_keys_for_a_template_that_reads_them() -> None:
    part = {"type": "text", "source_lang_code": "en", "text": "Hello"}
    assert rendered(KEYS, [{"role": "user", "content": [part]}]) == "en: Hello"
    assert rendered(KEYS, [turn("user", "Hello")]) == ": Hello"


@pytest.mark.parametrize("question", ["a", "u", "Is this text safe or not?"])
@cases(
    "template",
    "{{ messages[0].content }}",
    "user: {% for m in messages if m.role != 'user' %}{{ m.content }}{% endfor %}",
    "{% for m in messages %}{{ m.role }}: {{ m.text }}{% endfor %}",
)
def test_a_prompt_without_the_last_question_is_refused(template: str, question: str) -> None:
    messages = [turn("system", "You guard."), turn("user", question)]
    check_refused(lambda: rendered(template, messages), "leaves out the text of the user's last message")


@pytest.mark.parametrize("change", ["trim", "upper", "tojson", "e", "replace('text', 'x')", "reverse", "urlencode"])
def test_a_template_may_change_the_question(change: str) -> None:
    if change == "reverse":
        template = "{{ messages[-1].content }}{{ messages[-1].content | reverse }}"
    else:
        template = f"{{{{ messages[-1].content | {change} }}}}"
    for question in (" a ", "", '<b>Is "this" a text?</b>\n'):
        assert isinstance(rendered(template, [turn("user", question)]), str)


def test_an_image_or_an_empty_text_is_no_missing_question() -> None:
    template = "{% for m in messages %}{% for p in m.content %}{{ p.type }}{% endfor %}{% endfor %}"
    assert rendered(template, [{"role": "user", "content": [{"type": "image"}]}]) == "image"
    assert rendered(TEXT, [turn("user", "")]) == "user: \n"


LATE = [turn("user", "a"), turn("assistant", "b"), turn("system", "c"), turn("user", "d")]
REMINDER = "<system-reminder>\nc\n</system-reminder>"


@pytest.mark.parametrize("template", [STRICT, FORGETFUL])
@cases(
    "messages prompt",
    ([turn("system", "x1"), turn("system", "x2"), turn("user", "a")], "system: x1\n\nx2\nuser: a\n"),
    (LATE, f"user: a\nassistant: b\nuser: {REMINDER}\nd\n"),
    ([turn("system", "x1"), turn("user", "a"), turn("system", "c")], f"system: x1\nuser: a\n{REMINDER}\n"),
    (
        [turn("user", "a"), turn("system", "c"), turn("assistant", "b"), turn("user", "d")],
        f"user: a\n{REMINDER}\nassistant: b\nuser: d\n",
    ),
)
def test_a_template_that_wants_one_system_message_gets_one(template: str, messages: Any, prompt: str) -> None:
    assert rendered(template, messages) == prompt


def test_a_template_that_takes_late_system_messages_gets_them() -> None:
    assert rendered(TEXT, LATE) == "user: a\nassistant: b\nsystem: c\nuser: d\n"
    assert rendered(LOOP, LATE) == "user: a\nassistant: b\nsystem: c\nuser: d\n"


def test_a_refusal_for_another_reason_keeps_its_words() -> None:
    check_refused(lambda: rendered("{{ raise_exception('never') }}", LATE), "rejects the conversation: never")
