"""Prompts and their ids, and the formats of the answers to conversations.

A prompt is text, ids or messages, and can be truncated on the left. If it is far too long, it is refused before it is
tokenized.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import takewhile
from typing import Any, final

import numpy as np
import numpy.typing as npt
import torch

from infer.engine.step.request import Limits, whole_id
from infer.engine.step.request_options import RequestOptions
from infer.engine.step.sequence import common_length
from infer.errors import ContextLengthError, InvalidRequestError, about
from infer.model_settings import Overflow
from infer.request_limits import NUM_TOKENS_OF_CALLS
from infer.sampling_params import SamplingParams
from infer.system.sized_cache import SizedCache
from infer.text.tokenizer import Tokenizer
from infer.text.toolcalls.answer_format import AnswerFormat, Calls, TemplateFormats, probe_template, reasoning_of
from infer.text.toolcalls.formats import in_vocabulary, literals_of, marks_of
from infer.text.toolcalls.messages import shown_messages, shown_tools
from infer.text.toolcalls.tools import Tool, ToolChoice, read_tool_choice, read_tools

Message = Mapping[str, Any]
IdArray = torch.Tensor | npt.NDArray[Any]
Prompt = str | Sequence[int] | Sequence[Message] | IdArray  # a text, ids, or messages for the model's chat template

MAX_TEMPLATE_BYTES = 8 << 20
_LEAST_BYTES, _BYTES_PER_CHARACTER = 1_000, 4
_END_LENGTH = 32  # last ids of a prompt that are searched for an opened reasoning
_SYSTEM_ROLES = ("system", "developer")


def prompt_ids(prompt: Any, tokenizer: Tokenizer, max_seq_len: int | None, *, add_special: bool = True) -> list[int]:
    """Return the ids of a prompt that is text or ids.

    If `max_seq_len` is None, a text may have any length. `add_special` puts BOS before a text if the model needs it.
    Raises InvalidRequestError for anything else, and ContextLengthError for a text that cannot fit.
    """
    if isinstance(prompt, str):
        if max_seq_len is not None and (least := tokenizer.least_num_tokens(prompt)) > max_seq_len:
            raise ContextLengthError(
                f"the prompt is too long: it has at least {least} tokens and the maximum context length is "
                f"{max_seq_len} tokens: shorten it or raise max_seq_len"
            )
        return tokenizer.encode(prompt, add_special_tokens=add_special)
    if isinstance(prompt, bytes | bytearray | memoryview):
        raise InvalidRequestError("a prompt must be a text, ids or messages, got bytes: decode them first")
    if isinstance(prompt, Mapping):
        raise InvalidRequestError("a prompt must be a text, ids or messages, got one message: put it into a list")
    if not isinstance(prompt, Iterable):
        raise InvalidRequestError(f"a prompt must be a text, ids or messages, got {type(prompt).__name__}")
    given: list[Any] = _whole_numbers(prompt) if isinstance(prompt, torch.Tensor | np.ndarray) else list(prompt)
    if any(isinstance(each, Mapping) for each in given):
        return tokenizer.encode_chat(given)
    texts = [each for each in given if isinstance(each, str)]
    if texts:
        raise InvalidRequestError(
            f"a prompt must be one text, got a list with {texts[0]!r:.60}: generate_all() answers several prompts"
        )
    return [each if type(each) is int else whole_id("the prompt", each) for each in given]


def is_conversation(prompt: Any) -> bool:
    """Return True for a list of messages, from which single turns can be dropped."""
    return isinstance(prompt, Sequence) and not isinstance(prompt, str) and any(isinstance(m, Mapping) for m in prompt)


def system_messages(messages: Sequence[Message]) -> list[Message]:
    """Return the system messages at the beginning of a conversation."""
    return list(takewhile(lambda message: message.get("role") in _SYSTEM_ROLES, messages))


def fitted(
    prompt: Prompt, encode: Callable[[Prompt], list[int]], limits: Limits, params: SamplingParams, overflow: Overflow
) -> tuple[list[int], int, Sequence[Message]]:
    """Return the ids of a prompt, the number of truncated ids, and the messages that remain of a conversation.

    `overflow="truncate_left"` truncates a prompt so that there is room for the answer.

    For a text or ids, the last tokens are kept, after BOS if the prompt begins with it. For messages, the last turns
    are kept, after the system message. The answer's room is max_new_tokens (512 without a limit), but at most half of
    the context.
    """
    token_ids = encode(prompt)
    messages: list[Any] = list(prompt) if is_conversation(prompt) else []
    room = params.max_new_tokens or NUM_TOKENS_OF_CALLS
    most = limits.max_seq_len - min(room, limits.max_seq_len // 2)
    if overflow == "error" or len(token_ids) <= most:
        return token_ids, 0, messages
    if messages:
        return _last_turns(messages, encode, len(token_ids), most)
    head = token_ids[:1] if token_ids[0] == limits.bos_token_id else []
    kept = [*head, *token_ids[len(token_ids) - most + len(head) :]]
    return kept, len(token_ids) - len(kept), ()


def _last_turns(
    messages: Sequence[Any], encode: Callable[[Prompt], list[int]], num_tokens: int, most: int
) -> tuple[list[int], int, Sequence[Message]]:
    """Return what `fitted` does, without the oldest turns.

    A turn is a user's message and all messages up to the next one. System messages stay.
    """
    head = system_messages(messages)
    num_system = len(head)
    starts = [index for index in range(num_system, len(messages)) if messages[index].get("role") == "user"]
    starts = starts or [num_system]

    def ids_from(start: int) -> list[int]:
        return encode([*head, *messages[start:]])

    last = ids_from(starts[-1])
    if len(last) > most:
        raise ContextLengthError(
            f"the prompt is too long: its last turn has {len(last)} tokens with the system message, but only {most} "
            "fit before the answer: shorten it, raise max_seq_len or lower max_new_tokens"
        )
    first = bisect_left(starts[:-1], True, key=lambda start: len(ids_from(start)) <= most)
    kept = ids_from(starts[first])
    return kept, num_tokens - len(kept), [*head, *messages[starts[first] :]]


def _whole_numbers(ids: IdArray) -> list[int]:
    if ids.ndim != 1:
        raise InvalidRequestError(f"ids must have one dimension, got shape {tuple(ids.shape)}: pass one row")
    is_whole = ids.dtype.kind in "iu" if isinstance(ids, np.ndarray) else "int" in str(ids.dtype)
    if not is_whole:
        raise InvalidRequestError(f"token ids must be whole numbers, got an array of {ids.dtype}")
    whole: list[int] = ids.tolist()
    return whole


@final
class TemplateProbes:
    """Results of probing each chat template of a tokenizer. For any thread."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        # A cache, because requests may have their own templates.
        self._formats = SizedCache[TemplateFormats](MAX_TEMPLATE_BYTES)

    def of(self, chat_template: str | None, tool_format: str | None) -> TemplateFormats:
        """Return the conversation of a request. Raises InvalidRequestError."""
        tokenizer = self._tokenizer

        def render(messages: Sequence[Mapping[str, Any]], tools: Any) -> str:
            variables = {"chat_template": chat_template, "tools": tools, "add_generation_prompt": False}
            return tokenizer.render_chat_template(messages, **variables)

        def probe() -> TemplateFormats:
            return probe_template(render, tokenizer.template_source(chat_template, has_tools=True), tool_format)

        num_bytes = _LEAST_BYTES + _BYTES_PER_CHARACTER * len(chat_template or "")
        return self._formats.get_or_make((chat_template, tool_format), probe, lambda formats: num_bytes)


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
        if not self.options.tools:
            return ()
        with about("tools"):
            return read_tools(self.options.tools)

    @cached_property
    def choice(self) -> ToolChoice:
        tools = self.tools
        if self.options.tool_choice is None:
            return ToolChoice()
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
        given = [each for each in messages if isinstance(each, Mapping)]
        if not self.tools and not any(each.get("tool_calls") or each.get("role") == "tool" for each in given):
            return messages, dict(self.variables)
        tools = {"tools": shown_tools(self.tools, self.formats)} if self.tools else {}
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
