"""The items of `/v1/responses` (messages, calls, results and reasoning), and its tools. Chats use two Structs."""

from typing import Annotated, Any, Literal, final

from msgspec import Meta, Struct

from infer.request_limits import MAX_TOOLS
from infer.serving.protocols.body_fields import Parameters, ToolKeys


class _Part(Struct, tag_field="type", kw_only=True):
    pass


@final
class InputText(_Part, tag="input_text"):
    text: str


@final
class OutputText(_Part, tag="output_text", kw_only=True):
    """A text of an answer. A client can send it back unchanged."""

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
    status: str | None = None


@final
class InputMessage(_Item, tag="message"):
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[InputText | OutputText | OutputRefusal]
    phase: str | None = None


@final
class CallItem(_Item, tag="function_call"):
    call_id: str
    name: str
    arguments: str


@final
class ResultItem(_Item, tag="function_call_output"):
    call_id: str
    output: str | list[InputText]


@final
class ReasoningItem(_Item, tag="reasoning"):
    summary: list[Any] | None = None
    content: list[ReasoningText] | None = None


InputItem = InputMessage | CallItem | ResultItem | ReasoningItem


class Function(ToolKeys, kw_only=True):
    """A function. With `strict`, a schema that no grammar can enforce is refused; without it, that part is left out."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


@final
class ResponseTool(Function, kw_only=True, tag_field="type", tag="function"):
    """A function. With `strict`, a schema that no grammar can enforce is refused; without it, that part is left out.

    A `namespace` is put before the names of its tools. In the answer, namespace and name of a call are separate.
    """

    namespace: str | None = None


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
    """Hints about reasoning. Reasoning is not summarised."""

    effort: str | None = None
    summary: str | None = None
    generate_summary: str | None = None
