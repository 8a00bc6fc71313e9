"""What `/v1/responses` takes besides messages: calls, their results and reasoning as items, and tools."""

from typing import Annotated, Any, Literal, final

from msgspec import Meta, Struct

from infer.server.history import function_tools, past_arguments
from infer.server.unknown_fields import Parameters, Reading, ToolKeys
from infer.toolcalls.tools import MAX_TOOLS

_Status = Literal["in_progress", "completed", "incomplete"]


class _Part(Struct, tag_field="type", kw_only=True):
    pass


@final
class InputText(_Part, tag="input_text"):
    text: str


@final
class OutputText(_Part, tag="output_text", kw_only=True):
    """As an answer has it, so that it can be sent back."""

    text: str
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None


@final
class OutputRefusal(_Part, tag="refusal"):
    refusal: str


@final
class ReasoningText(_Part, tag="reasoning_text"):
    text: str


class _Item(Struct, kw_only=True, tag_field="type"):
    id: str | None = None
    status: _Status | None = None


@final
class InputMessage(_Item, tag="message"):
    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[list[InputText | OutputText | OutputRefusal], Meta(min_length=1)]
    phase: str | None = None


@final
class CallItem(_Item, tag="function_call"):
    call_id: str
    name: str
    arguments: str
    namespace: None = None


@final
class ResultItem(_Item, tag="function_call_output"):
    call_id: str
    output: str | Annotated[list[InputText], Meta(min_length=1)]


@final
class ReasoningItem(_Item, tag="reasoning"):
    summary: list[Any] | None = None
    content: list[ReasoningText] | None = None
    encrypted_content: None = None


InputItem = InputMessage | CallItem | ResultItem | ReasoningItem


@final
class ResponseTool(ToolKeys, kw_only=True, tag_field="type", tag="function"):
    """`strict` or not, a call is held to the schema."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class _Choice(Parameters, tag_field="type", kw_only=True):
    pass


@final
class NamedTool(_Choice, tag="function"):
    name: str


@final
class AllowedNames(_Choice, tag="allowed_tools"):
    mode: Literal["auto", "required"]
    tools: list[NamedTool]


ResponseTools = Annotated[list[ResponseTool], Meta(max_length=MAX_TOOLS)]
ResponseToolChoice = Literal["none", "auto", "required"] | NamedTool | AllowedNames


@final
class ReasoningSettings(Parameters):
    """Nothing is summarised."""

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: None = None


def with_types(body: Any, reading: Reading) -> Any:
    """Return the body with a type for each item: one without is a message."""
    if not isinstance(body, dict):
        return body
    body = dict(body)
    if isinstance(items := body.get("input"), list):
        body["input"] = [
            _item(each, f"input[{i}]", reading) if isinstance(each, dict) else each for i, each in enumerate(items)
        ]
    if isinstance(tools := body.get("tools"), list):
        body["tools"] = function_tools(tools, reading)
    return body


def _item(item: dict[str, Any], path: str, reading: Reading) -> dict[str, Any]:
    found = {"type": "message", **item}
    if found["type"] == "function_call":
        found["arguments"] = past_arguments(found.get("arguments"), f"{path}.arguments", reading)
    return found
