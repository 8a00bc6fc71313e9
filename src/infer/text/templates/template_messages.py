"""Messages in the forms that chat templates take: contents as texts or as parts, and system messages in odd places."""

from collections.abc import Callable, Mapping, Sequence
from itertools import takewhile
from typing import Any, NamedTuple

SYSTEM_ROLES = ("system", "developer")
RARE = "5830194726"  # digits, which no template changes
_RARE_KEY = "key6105839274"  # appears in the prompt if a template dumps parts instead of reading their texts
_CALL = {"id": "abcdefghi", "type": "function", "function": {"name": "probe", "arguments": {}}}
Message = dict[str, Any]


class ContentForms(NamedTuple):
    """The forms of a role's content whose text appears in the rendered prompt."""

    text: bool
    parts: bool


def probe_forms(render: Callable[[list[Message]], str], role: str, user: ContentForms | None) -> ContentForms:
    """Return the forms of a role's content. `user` has those of the user's; `render` returns "" for a refusal."""
    hello = {"role": "user", "content": _parts("Hello") if user and user.parts and not user.text else "Hello"}
    call = {"role": "assistant", "content": "", "tool_calls": [_CALL]}
    before = list[Message]()
    if role in ("assistant", "tool"):
        before = [hello, call] if role == "tool" else [hello]
    after = [] if role in ("user", "tool") else [hello]

    def shown(content: Any) -> str:
        return render(
            [*before, {"role": role, "name": "probe", "tool_call_id": _CALL["id"], "content": content}, *after]
        )

    of_parts = shown([{"type": "text", "text": RARE, _RARE_KEY: 1}])
    return ContentForms(RARE in shown(RARE), RARE in of_parts and _RARE_KEY not in of_parts)


def with_form(message: Message, forms: ContentForms) -> Message:
    """Return the message with its content in a form that the template shows. Other forms stay as they are."""
    content = message.get("content")
    if isinstance(content, str) and forms.parts and not forms.text:
        return {**message, "content": _parts(content)}
    if isinstance(content, list) and forms.text and not forms.parts and all(map(_is_text, content)):
        return {**message, "content": text_of_content(content)}
    return message


def text_of_content(content: Any) -> str:
    """Return the text of a content. The texts of parts are joined."""
    return "".join(texts_of_content(content))


def texts_of_content(content: Any) -> list[str]:
    if isinstance(content, list | tuple):
        return [part["text"] for part in content if _is_text(part)]
    return [content] if isinstance(content, str) else []


def with_texts(message: Message, text: str) -> Message:
    """Return the message with this text in place of its text, or of each of its parts."""
    content = message["content"]
    if isinstance(content, str):
        return {**message, "content": text}
    return {**message, "content": [{**part, "text": text} if _is_text(part) else part for part in content]}


def odd_system_texts(messages: Sequence[Message]) -> list[str]:
    """Return the texts of system messages that are not the first message, and the developer's."""
    odd = [each for at, each in enumerate(messages) if each.get("role") in (SYSTEM_ROLES if at else ("developer",))]
    return [text for message in odd if (text := text_of_content(message.get("content")).strip())]


def with_one_system(messages: Sequence[Message]) -> list[Message]:
    """Return the messages with at most one system message, as the first message.

    The leading ones are joined by a blank line. A later one becomes a text of the user, in the tags that Claude Code
    uses for its reminders, and is joined to the user's message beside it.
    """
    found = list[Message]()
    if leading := [*takewhile(lambda message: message.get("role") in SYSTEM_ROLES, messages)]:
        texts = [text_of_content(message.get("content")) for message in leading]
        found.append({**leading[0], "role": "system", "content": "\n\n".join(filter(None, texts))})
    was_late = False
    for message in messages[len(leading) :]:
        is_late = message.get("role") in SYSTEM_ROLES
        if is_late:
            text = text_of_content(message.get("content"))
            message = {"role": "user", "content": f"<system-reminder>\n{text}\n</system-reminder>"}
        if (is_late or was_late) and found and found[-1].get("role") == message.get("role") == "user":
            message = {**found[-1], "content": _joined(found.pop()["content"], message.get("content"))}
        found.append(message)
        was_late = is_late
    return found


def without_system(messages: Sequence[Message]) -> list[Message]:
    """Return the messages whose first one is the user's, after the text of the system message before it."""
    first, *others = with_one_system(messages)
    if first.get("role") != "system" or not others or others[0].get("role") != "user":
        return [first, *others]
    return [{**others[0], "content": _joined(f"{first['content']}\n", others[0].get("content"))}, *others[1:]]


def _joined(first: Any, second: Any) -> Any:
    """Return two contents as one, in lines of their own."""
    if isinstance(first, str) and isinstance(second, str):
        return f"{first}\n{second}"
    return [*(_parts(f"{first}\n") if isinstance(first, str) else first or ()),
            *(_parts(f"\n{second}") if isinstance(second, str) else second or ())]  # fmt: skip


def _parts(text: str) -> list[Message]:
    return [{"type": "text", "text": text}]


def _is_text(part: Any) -> bool:
    return isinstance(part, Mapping) and isinstance(part.get("text"), str) and part.get("type", "text") == "text"
