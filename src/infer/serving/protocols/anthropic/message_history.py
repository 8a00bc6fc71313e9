"""Convert bodies of `/v1/messages` from other programs to the blocks and tools that this server reads."""

from typing import Any

import msgspec

from infer.serving.protocols.chat_messages import complete_each, own_tools, past_arguments, placeholder
from infer.serving.protocols.refusals import refuse
from infer.serving.protocols.unknown_fields import Reading

_KNOWN = ("text", "tool_use", "tool_result", "thinking")


def complete_messages(given: Any, reading: Reading) -> Any:
    """Return the body whose messages and tools have only known kinds of blocks and tools.

    Raises BodyError for an image or a file in the user's last message, unless it answers a tool's call.
    """
    if not isinstance(given, dict):
        return given
    given = dict(given)
    if isinstance(system := given.get("system"), list):
        given["system"] = _blocks(system, "system", reading, is_refused=False)
    if isinstance(turns := given.get("messages"), list):
        given["messages"] = complete_each(turns, reading, _turn)
    if isinstance(tools := given.get("tools"), list):
        given["tools"] = own_tools(tools, reading, "custom")  # Anthropic itself runs tools of the other kinds
    return given


def _turn(turn: dict[str, Any], path: str, reading: Reading, *, is_last: bool) -> dict[str, Any]:
    content = turn.get("content")
    if content is None:
        return {**turn, "content": ""} if "content" in turn else turn
    if not isinstance(content, list):
        return turn
    has_results = any(isinstance(each, dict) and each.get("type") == "tool_result" for each in content)
    blocks = _blocks(content, f"{path}.content", reading, is_refused=is_last and not has_results)
    return {**turn, "content": blocks}


def _blocks(given: list[Any], path: str, reading: Reading, *, is_refused: bool) -> list[Any]:
    found = list[Any]()
    for index, block in enumerate(given):
        if isinstance(block, str):
            found.append(_text(block))
        elif not isinstance(block, dict) or not isinstance(kind := block.get("type"), str):
            found.append(block)
        elif (kept := _block(block, kind, f"{path}[{index}]", reading, is_refused=is_refused)) is not None:
            found.append(kept)
    return found


def _block(block: dict[str, Any], kind: str, path: str, reading: Reading, *, is_refused: bool) -> dict[str, Any] | None:
    """Return the block in a known kind, or None if it must be left out. Raises BodyError."""
    match kind:
        case "text" if block.get("text") is None and "text" in block:
            return {**block, "text": ""}
        case "tool_use":
            return {**block, "input": _input(block.get("input"), f"{path}.input", reading)}
        case "tool_result":
            return _result(block, path, reading)
        case "thinking" if not isinstance(block.get("thinking"), str):
            reading.warn(f"{path} was left out: its thinking cannot be read")
            return None
        case "redacted_thinking":
            reading.warn(f"{path} was left out: its thinking is encrypted for another provider")
            return None
    if kind in _KNOWN:
        return block
    if (text := _readable(block, kind)) is not None:
        return _text(text)
    if is_refused and block.get("source") is None and kind not in ("image", "document", "container_upload"):
        raise refuse(f"{path} is of type {kind!r:.40}, which is not known here: leave it out", path)
    return _text(placeholder(kind, path, reading, is_refused=is_refused))


def _result(block: dict[str, Any], path: str, reading: Reading) -> dict[str, Any]:
    content = block.get("content")
    if isinstance(content, list):
        content = _blocks(content, f"{path}.content", reading, is_refused=False)
    elif isinstance(content, dict):
        content = msgspec.json.encode(content).decode()
    if not content and block.get("is_error") is True:
        content = "[error]"  # the tool returned nothing but the error flag
    return {**block, "content": content}


def _input(given: Any, path: str, reading: Reading) -> Any:
    """Return the input of an earlier call as an object."""
    return given if isinstance(given, dict) else msgspec.json.decode(past_arguments(given, path, reading))


def _readable(block: dict[str, Any], kind: str) -> str | None:
    """Return the text of a document or a search result if it is plain text, else None."""
    match kind, block.get("source"):
        case "document", {"type": "text", "data": str(text)}:
            return _titled(block, text)
        case "document", {"type": "content", "content": content}:
            return _titled(block, _joined(content))
        case "search_result", _:
            return _titled(block, _joined(block.get("content")))
    return None


def _joined(content: Any) -> str | None:
    """Return the joined texts of a list of text blocks, or None if a block is of another kind."""
    match content:
        case str():
            return content
        case [*blocks] if all(isinstance(each, dict) and isinstance(each.get("text"), str) for each in blocks):
            return "".join(each["text"] for each in blocks)
    return None


def _titled(block: dict[str, Any], text: str | None) -> str | None:
    title = block.get("title")
    return f"{title}\n{text}" if text is not None and isinstance(title, str) and title else text


def _text(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}
