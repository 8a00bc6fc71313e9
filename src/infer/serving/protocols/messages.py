"""Convert conversations of other programs to messages and tools that this server reads, and these to a template's.

Clients send back the answers of any server, and their users cannot change these answers. So an earlier message is never
refused, except for an image or a file in the user's last message, which the answer would need.
"""

from collections.abc import Callable
from typing import Annotated, Any, final

from msgspec import Meta, Struct

from infer.serving.protocols.fields import Reading, refuse
from infer.text.toolcalls.tools import past_arguments as read_past_arguments
from infer.text.toolcalls.tools import with_objects

_WORDS = ("image", "audio", "video", "file", "document")
Arguments = Annotated[Any, Meta(extra_json_schema={"type": "string"})]  # `past_arguments` made an object of it
_TEXT_TYPES = frozenset({"text", "input_text", "output_text"})


@final
class OutputRefusal(Struct, tag_field="type", tag="refusal", kw_only=True):
    refusal: str


def complete_each(messages: list[Any], reading: Reading, complete: Callable[..., dict[str, Any]]) -> list[Any]:
    """Return the messages that `complete` makes. For the user's last message, it is called with `is_last`."""
    messages = [with_role(each) for each in messages]
    last = last_user(messages)
    return [
        complete(each, f"messages[{index}]", reading, is_last=index == last) if isinstance(each, dict) else each
        for index, each in enumerate(messages)
    ]


def with_role(message: Any) -> Any:
    """Return a message with its role in small letters, which clients in Java write in capitals."""
    role = message.get("role") if isinstance(message, dict) else None
    return {**message, "role": role.lower()} if isinstance(role, str) else message


def last_user(messages: list[Any]) -> int:
    """Return the index of the user's last message, or -1 if there is none."""
    for index in range(len(messages) - 1, -1, -1):
        if isinstance(each := messages[index], dict) and each.get("role") == "user":
            return index
    return -1


def own_tools(
    tools: list[Any],
    reading: Reading,
    own_kind: str = "function",
    expand: Callable[[Any, str], list[Any]] = lambda tool, path: [tool],
) -> list[Any]:
    """Return the tools that the client runs; a tool of another kind is left out with a warning.

    `expand` returns the tools that replace a tool, which it receives with its path.
    """
    found = list[Any]()
    for index, given in enumerate(with_objects(tools)):
        path = f"tools[{index}]"
        for tool in expand(given, path):
            kind = tool.get("type") if isinstance(tool, dict) else None
            if isinstance(kind, str) and kind != own_kind:
                reading.warn(f"{path} was left out: tools of type {kind!r:.40} cannot be run here")
            else:
                found.append(tool)
    return found


def text_parts(parts: list[Any], path: str, reading: Reading, text_type: str, *, is_last: bool) -> list[Any]:
    """Return the parts with this type for texts, and with a placeholder for each part that has no text.

    Raises BodyError for a part that has no text if `is_last`.
    """
    found = list[Any]()
    for index, part in enumerate(parts):
        if isinstance(part, str):
            found.append({"type": text_type, "text": part})
        elif not isinstance(part, dict) or not isinstance(kind := part.get("type", "text"), str):
            found.append(part)
        elif kind in _TEXT_TYPES:
            own = {name: value for name, value in part.items() if name not in ("type", "text")}
            kept = {**part, "type": text_type} if "type" in part or "text" in part else part
            found.append(kept | {"own": own} if own else kept)
        elif kind == "refusal":
            found.append(part)
        else:
            text = placeholder(kind, f"{path}[{index}]", reading, is_refused=is_last)
            found.append({"type": text_type, "text": text})
    return found


def placeholder(kind: str, path: str, reading: Reading, *, is_refused: bool) -> str:
    """Return the text that replaces a part that has no text, and warn about it. Raises BodyError if `is_refused`."""
    word = next((each for each in _WORDS if each in kind), "part")
    if is_refused:
        raise refuse(f"{path} is of type {kind!r:.40}: the model reads only text, leave the {word} out", path)
    reading.warn(f"{path} is of type {kind!r:.40} and was replaced by [{word}]: the model reads only text")
    return f"[{word}]"


def past_arguments(given: Any, path: str, reading: Reading) -> dict[str, Any]:
    """Return the arguments of an earlier call as an object, and warn if they are not one.

    Templates serialize them themselves.
    """
    values, warning = read_past_arguments(given)
    if warning is not None:
        reading.warn(f"{path}: {warning}")
    return values


def call_of_message(call_id: str, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """Return a past call as chat templates expect it."""
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def text_of(content: Any) -> str:
    """Return the text of a content. The texts of parts are joined; without a content, the text is empty."""
    if not isinstance(content, list):
        return content or ""
    return "".join(part.refusal if isinstance(part, OutputRefusal) else part.text for part in content)
