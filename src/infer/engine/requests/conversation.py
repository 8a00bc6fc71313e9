"""Make a prompt of messages, and find the format of the answer."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, final

from infer.engine.requests.prompt_encoding import Message, Prompt, system_messages
from infer.engine.step.request_options import RequestOptions
from infer.engine.step.sequence import common_length
from infer.errors import InvalidRequestError, about
from infer.system.memory.sized_cache import SizedCache
from infer.text.tokenizer import Tokenizer
from infer.text.toolcalls.answer_format import AnswerFormat, Calls
from infer.text.toolcalls.formats import in_vocabulary, literals_of, marks_of
from infer.text.toolcalls.messages import shown_messages
from infer.text.toolcalls.template_formats import TemplateFormats, probe_template, reasoning_of
from infer.text.toolcalls.tools import Tool, ToolChoice, read_tool_choice, read_tools

MAX_TEMPLATE_BYTES = 8 << 20
_LEAST_BYTES, _BYTES_PER_CHARACTER = 1_000, 4
_END_LENGTH = 32  # last ids of a prompt that are searched for an opened reasoning


@final
class TemplateProbes:
    """Results of probing each chat template of a tokenizer. For any thread."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        # A cache, because requests may have their own templates.
        self._found = SizedCache[TemplateFormats](MAX_TEMPLATE_BYTES)

    def of(self, chat_template: str | None, tool_format: str | None) -> TemplateFormats:
        """Return the conversation of a request. Raises InvalidRequestError."""
        tokenizer = self._tokenizer

        def render(messages: Sequence[Mapping[str, Any]], tools: Any) -> str:
            variables = {"chat_template": chat_template, "tools": tools, "add_generation_prompt": False}
            return tokenizer.render_chat_template(messages, **variables)

        def probe() -> TemplateFormats:
            return probe_template(render, tokenizer.template_source(chat_template, has_tools=True), tool_format)

        num_bytes = _LEAST_BYTES + _BYTES_PER_CHARACTER * len(chat_template or "")
        return self._found.get_or_make((chat_template, tool_format), probe, lambda found: num_bytes)


@final
@dataclass(frozen=True)
class Conversation:
    """Options of one request, and the variables of its template."""

    tokenizer: Tokenizer
    probes: TemplateProbes
    options: RequestOptions
    variables: Mapping[str, Any]

    def __post_init__(self) -> None:
        """Raise InvalidRequestError if a tool is not valid, or if `tool_choice` does not fit the tools."""
        self.choice  # noqa: B018

    @cached_property
    def tools(self) -> tuple[Tool, ...]:
        with about("tools"):
            return read_tools(self.options.tools or ())

    @cached_property
    def choice(self) -> ToolChoice:
        tools = self.tools
        with about("tool_choice"):
            return read_tool_choice(self.options.tool_choice, tools)

    @cached_property
    def formats(self) -> TemplateFormats:
        with about("tools"):
            return self.probes.of(self.variables.get("chat_template"), self.options.tool_format)

    def encode(self, messages: Prompt) -> list[int]:
        """Return the prompt's ids. Raises InvalidRequestError."""
        if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Iterable):
            raise InvalidRequestError(
                f"a conversation must be a list of messages, got {messages!r:.60}: [{{'role': 'user', 'content': ...}}]"
            )
        shown, variables = self.shown(list(messages))
        return self.tokenizer.encode_chat(shown, **variables)

    def checkpoints(self, messages: Sequence[Message], token_ids: Sequence[int]) -> tuple[int, ...]:
        """Return the two positions, ascending, up to which later prompts will probably be equal to this one.

        Other conversations share the tools and the system messages. The next turn shares everything except the
        generation prompt. Both positions are found by rendering a conversation with the same system messages and an
        empty question. If the template refuses that conversation, there are no such positions.
        """
        try:
            other = self.encode([*system_messages(messages), {"role": "user", "content": ""}])
        except InvalidRequestError:
            return ()
        beginning, ending = common_length(other, token_ids), common_length(other[::-1], token_ids[::-1])
        return tuple(sorted((beginning, len(token_ids) - ending)))

    def shown(self, messages: list[Any]) -> tuple[list[Any], dict[str, Any]]:
        """Return messages and variables in the form that the template expects."""
        if not self.tools and not _has_calls(messages):
            return messages, dict(self.variables)
        tools = {"tools": [tool.to_json() for tool in self.tools]} if self.tools else {}
        is_offered = self.choice.kind != "none" or self.formats.shows_tools
        shown = shown_messages(messages, self.tools if is_offered else (), self.formats)
        return list(shown), {**self.variables, **tools}

    def answer_format(self, prompt_ids: Sequence[int]) -> AnswerFormat | None:
        """Return the format of the answer to this prompt, or None if it is plain text."""
        options = self.options
        source = self.tokenizer.template_source(self.variables.get("chat_template"), has_tools=bool(self.tools))
        reasoning = reasoning_of(source)
        forms = [form for form in (reasoning, self.formats.calls if self.tools else None) if form is not None]
        if not forms:
            if options.reasoning_budget:
                message = "reasoning_budget: the chat template has no reasoning: leave it out"
                raise InvalidRequestError(message, param="reasoning_budget")
            return None
        is_open = reasoning is not None and self._ends_with(prompt_ids, reasoning.opening)
        if reasoning is not None and reasoning.body and not is_open:
            ends = (reasoning.start + reasoning.role, reasoning.closing)
            if not any(self._ends_with(prompt_ids, end) for end in ends):
                return None  # the prompt ends within a message, which the answer continues
        ids = self.tokenizer.special_ids_in([text for form in forms for text in literals_of(form)])
        marks = marks_of(ids)
        calls = None
        if self.tools:
            names = self.choice.names
            tools = tuple(tool for tool in self.tools if names is None or tool.name in names)
            form = in_vocabulary(self.formats.calls, marks)
            is_parallel = options.parallel_tool_calls
            if is_parallel is None:
                is_parallel = not self.choice.is_named
            calls = Calls(form, tools, self.choice.kind, is_parallel=is_parallel)
        return AnswerFormat(
            calls,
            None if reasoning is None else in_vocabulary(reasoning, marks),
            is_open=is_open,
            is_apart=options.reasoning_format == "auto",
            budget=options.reasoning_budget,
            marks={ids[text]: mark for text, mark in marks.items()},
        )

    def _ends_with(self, prompt_ids: Sequence[int], text: str) -> bool:
        return self.tokenizer.decode(prompt_ids[-_END_LENGTH:], skip_special_tokens=False).rstrip().endswith(text)


def _has_calls(messages: Iterable[Any]) -> bool:
    called = (each.get("tool_calls") or each.get("role") == "tool" for each in messages if isinstance(each, Mapping))
    return any(called)
