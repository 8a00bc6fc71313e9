"""Chat templates: conversations to text, rendered as Hugging Face does.

`ChatTemplate.render` returns the text of `transformers`' `apply_chat_template`. `ChatTemplate.render_marked` returns
the same text, cut wherever the text of a special token came from a message. Such text must not become a control id.
"""

import re
import signal
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from infer.errors import InvalidRequestError
from infer.system.child_process import MEMORY_BYTES, ChildError, Lane
from infer.text.templates.special_tokens import ComposedText, PromptPart, SpecialTexts
from infer.text.templates.template_messages import (
    RARE,
    SYSTEM_ROLES,
    ContentForms,
    odd_system_texts,
    probe_forms,
    texts_of_content,
    with_form,
    with_one_system,
    with_texts,
    without_system,
)

RENDER_SECONDS = 2.0  # processor seconds
MAX_CHARACTERS = 1 << 24
_WAIT_SECONDS = 120.0  # for a process that waits for a free processor


class TemplateRefusalError(InvalidRequestError):
    """The template refuses the conversation with its own message."""


class TemplateLimitError(InvalidRequestError):
    """The template takes more time, memory or characters than it may."""


_ERRORS = {"refusal": TemplateRefusalError, "limit": TemplateLimitError}


@cache
def _lane() -> Lane:
    return Lane(Path(__file__).with_name("template_child.py"), str(RENDER_SECONDS), str(MEMORY_BYTES))


def start_rendering() -> None:
    """Start the process, so that it starts while a model is loaded."""
    _lane().start()


def render(source: str, variables: Mapping[str, Any]) -> str:
    """Return the text, of at most `MAX_CHARACTERS`. Raises InvalidRequestError that points at the template's line."""
    try:
        answer = _lane().ask([source, variables, MAX_CHARACTERS], _WAIT_SECONDS)
    except ChildError as error:
        problem = f"takes more than {RENDER_SECONDS:g} s" if error.signal == signal.SIGPROF else "makes Python crash"
        raise TemplateLimitError(f"the chat template {problem}: it cannot be used") from None
    except (TypeError, ValueError, RecursionError) as error:  # JSON has neither tuples as keys nor 5,000 digits
        raise InvalidRequestError(f"the conversation cannot be passed to a chat template: {error}") from None
    except TimeoutError:
        raise TemplateLimitError(f"the chat template was not rendered within {_WAIT_SECONDS:g} s") from None
    if "text" in answer:
        return str(answer["text"])
    where = "" if answer["line"] is None else f", line {answer['line']},"
    error_class = _ERRORS.get(answer["kind"], InvalidRequestError)
    raise error_class(f"the chat template{where} {' '.join(answer['problem'].split())}")


# Hugging Face's names of a message's reasoning. Templates read the first one.
REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")
_PRIVATE_USE_CHARACTERS = range(0xE000, 0xF8FF)
_CONTINUE_TAG = "CONTINUE_FINAL_MESSAGE_TAG "  # Hugging Face's; it shows where the template put the message's end
_TAKEN_APART = "a message contains the text of a special token, which the chat template splits: remove it"
_OF_ROLES = re.compile("system|role", re.IGNORECASE)  # in the words with which templates refuse system messages
_UNLIKELY = 16  # characters of a text that is in a prompt only because the template shows it
_ROLES = (*SYSTEM_ROLES, "user", "assistant", "tool")
_NO_VARIABLES = {"add_generation_prompt": False, "tools": None, "documents": None}
_PROBE = ({"role": "user", "content": "Hello"},)
_PROBE_TOOL = {
    "type": "function",
    "function": {"name": "probe", "description": "A probe.", "parameters": {"type": "object", "properties": {}}},
}


class ChatTemplate:
    """A template with the variables of its tokenizer (`bos_token`, …), and the forms of contents that it shows."""

    def __init__(self, source: str, variables: Mapping[str, str]) -> None:
        self.source = source
        self._variables = dict(variables)
        self._forms_by_role: dict[str, ContentForms] = {}

    def check(self) -> None:
        """Render a short conversation, with tools if it works only with tools.

        Raises InvalidRequestError for a template that can render neither.
        """
        failures = list[InvalidRequestError]()
        for tools in (None, [_PROBE_TOOL]):
            try:
                self._render(_context(_PROBE, False, {"tools": tools}))
            except TemplateRefusalError:  # it may require a system message, which is not a fault
                return
            except InvalidRequestError as error:
                failures.append(error)
            else:
                return
        raise failures[0]

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        needs_question: bool = False,
        /,  # a template may have variables of these names
        *,
        continue_final_message: bool = False,
        **variables: Any,
    ) -> str:
        """Return the rendered text.

        `variables` are `add_generation_prompt` (by default true), `tools`, `documents`, and the template's own. With
        `continue_final_message` the text ends where the last message ends, so that the model continues that message.
        With `needs_question`, raises InvalidRequestError if the text lacks that of the user's last message.
        """
        context, text = self._accepted(_context(messages, continue_final_message, variables))
        if needs_question:
            self._check_question(context, text)
        return text[: _end_of_final_message(text)] if continue_final_message else text

    def render_marked(
        self,
        messages: Sequence[Mapping[str, Any]],
        special_texts: SpecialTexts,
        *,
        continue_final_message: bool = False,
        **variables: Any,
    ) -> list[PromptPart]:
        """Return the rendered text in pieces.

        Special-token text that a message wrote is in pieces that are not control, unless it is in our own part of a
        `ComposedText`.

        Each string with such text, or with a fragment that its neighbour could complete, gets a mark inside it. Then
        the template is rendered again, and the marks show where the text went. If the marks change the rendered text,
        its origin is unknown, and the request raises InvalidRequestError. The same applies to a string from which a
        template could make a special token by removing characters.
        """
        context, text = self._accepted(_context(messages, continue_final_message, variables))
        end = _end_of_final_message(text) if continue_final_message else len(text)
        strings = _strings(context)
        mark = _unused_character(text + self.source + "".join(strings))
        pieces = [PromptPart(text[:end], is_control=True)]
        if any(map(special_texts.are_hinted_in, strings)):
            marked = self._render(_map_strings(context, lambda string: special_texts.mark(string, mark)))
            if marked.replace(mark, "") != text:
                raise InvalidRequestError(_TAKEN_APART)
            pieces = special_texts.cut(_beginning_without(marked, mark, end), mark)
        own = [found for piece in pieces if piece.is_control for found in special_texts.found_in(piece.text)]
        if any(_is_left_of(string, special) for special in set(own) for string in strings):
            marked = self._render(_map_strings(context, lambda string: special_texts.mark_beginnings(string, mark)))
            num_foreign = len(special_texts.found_in(text[:end])) - len(own)
            if len(special_texts.found_in(marked)) < len(special_texts.found_in(text)) - num_foreign:
                raise InvalidRequestError(_TAKEN_APART)
        self._check_question(context, text)
        return pieces

    def _accepted(self, context: dict[str, Any]) -> tuple[dict[str, Any], str]:
        """Return the variables with messages in a form that the template takes, and the rendered text.

        If the template refuses or leaves out a system message in an odd place, it gets one system message. If it
        refuses that, the user's first message begins with its text.
        """
        odd = odd_system_texts(given := context["messages"])
        forms: list[Callable[[Any], list[Any]]] = [list, *[with_one_system] * bool(odd), without_system]
        refusals, first = list[InvalidRequestError](), None
        for form in forms:
            if form is without_system and not (refusals and _OF_ROLES.search(str(refusals[0]))):
                continue  # it was something else that the template refused
            fitted = {**context, "messages": [with_form(each, self._forms(each)) for each in form(given)]}
            try:
                text = self._render(fitted)
            except TemplateLimitError:
                raise
            except InvalidRequestError as error:
                refusals.append(error)
                continue
            if all(each in text for each in odd):
                return fitted, text
            first = first or (fitted, text)
        if first is None:
            raise refusals[0]
        return first

    def _forms(self, message: Mapping[str, Any]) -> ContentForms:
        """Return the forms of contents of the message's role that the template shows. They are probed once."""
        role = message.get("role")
        role = role if role in _ROLES else "user"
        if role not in self._forms_by_role:
            user = None if role == "user" else self._forms({"role": "user"})
            found = probe_forms(self._probe, role, user)
            self._forms_by_role[role] = user if user is not None and not any(found) else found
        return self._forms_by_role[role]

    def _probe(self, messages: list[dict[str, Any]], variables: Mapping[str, Any] = _NO_VARIABLES) -> str:
        """Return the rendered text, or "" if the template refuses."""
        try:
            return self._render({**variables, "messages": messages})
        except TemplateLimitError:
            raise
        except InvalidRequestError:
            return ""

    def _check_question(self, context: Mapping[str, Any], text: str) -> None:
        """Raise InvalidRequestError if the user's last message is not in the rendered text.

        A template may change a text, and a short text may be elsewhere in the prompt. So a rare text takes its place
        before anything is refused.
        """
        messages = context["messages"]
        last = next((index for index, each in reversed([*enumerate(messages)]) if each.get("role") == "user"), None)
        if last is None:
            return
        texts = [stripped for each in texts_of_content(messages[last].get("content")) if (stripped := each.strip())]
        if not texts or all(len(each) >= _UNLIKELY and each in text for each in texts):
            return
        rare = [*messages[:last], with_texts(messages[last], RARE), *messages[last + 1 :]]
        try:
            rendered = self._probe(rare, context)
        except TemplateLimitError:  # the prompt itself was within the limits
            return
        if rendered and rendered.count(RARE) < len(texts):
            raise InvalidRequestError(
                "the chat template leaves out the text of the user's last message, so the model would not see it: use "
                "another chat_template, or give the content in the form that the template reads"
            )

    def _render(self, context: Mapping[str, Any]) -> str:
        return render(self.source, {**self._variables, **_map_strings(context, str)})


def _context(
    messages: Sequence[Mapping[str, Any]], continue_final_message: bool, variables: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the template's variables: plain JSON values, as Hugging Face prepares them."""
    if not messages:
        raise InvalidRequestError("messages must contain at least one message, got none")
    _check_mappings("messages", messages, "with a role")
    given = {"add_generation_prompt": not continue_final_message, "tools": None, "documents": None, **variables}
    for name in ("tools", "documents"):
        if given[name] is not None:
            _check_mappings(name, given[name], "as in JSON")
    try:
        plain = [_with_reasoning_aliases(_plain(_present(message))) for message in messages]
        given = {name: _plain(value) for name, value in given.items()}
    except RecursionError:
        raise InvalidRequestError("messages, tools or documents are nested too deeply") from None
    if continue_final_message:
        if given["add_generation_prompt"]:
            raise InvalidRequestError(
                "continue_final_message and add_generation_prompt contradict each other: give only one of them"
            )
        _tag_end(plain[-1])
    return {**given, "messages": plain}


def _present(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return the message without values that mean that nothing is there. Without calls, a content of None is empty."""
    kept = {key: value for key, value in message.items() if value is not None and (value or key != "tool_calls")}
    return {**kept, "content": ""} if "content" in message.keys() - kept and "tool_calls" not in kept else kept


def _check_mappings(name: str, values: Any, kind: str) -> None:
    if not isinstance(values, Sequence) or isinstance(values, str):
        raise InvalidRequestError(f"{name} must be a list of mappings {kind}, got {type(values).__name__}")
    for index, value in enumerate(values):
        if not isinstance(value, Mapping):
            raise InvalidRequestError(f"{name}[{index}] must be a mapping {kind}, got {type(value).__name__}")


def _tag_end(message: dict[str, Any]) -> None:
    """Append the tag to the message's content, or to the last text of its parts."""
    content = message.get("content")
    if isinstance(content, str):
        message["content"] = content + _CONTINUE_TAG
        return
    parts = [part for part in content or () if isinstance(part, dict) and isinstance(part.get("text"), str)]
    if not parts:
        raise InvalidRequestError("continue_final_message needs text in the last message: add text to it")
    parts[-1]["text"] += _CONTINUE_TAG


def _end_of_final_message(text: str) -> int:
    place = text.rfind(_CONTINUE_TAG.rstrip())
    if place < 0:
        raise InvalidRequestError("continue_final_message: the chat template does not render the last message")
    if text.startswith(_CONTINUE_TAG, place):
        return place
    return len(text[:place].rstrip())  # because the template strips messages


def _is_left_of(string: str, special: str) -> bool:
    """Return True if removing some characters of the string can leave the text `special`."""
    characters = iter(string)
    return all(character in characters for character in special)


def _beginning_without(marked: str, mark: str, length: int) -> str:
    """Return the beginning of `marked` that has this length after its marks are removed."""
    end = length
    while (longer := length + marked.count(mark, 0, end)) > end:
        end = longer
    return marked[:end]


def _with_reasoning_aliases(message: dict[str, Any]) -> dict[str, Any]:
    reasoning = next((message[name] for name in REASONING_FIELDS if message.get(name) is not None), None)
    return message if reasoning is None else {"thinking": reasoning, **message, "reasoning_content": reasoning}


def _plain(value: Any) -> Any:
    """Return the value with JSON types only, because a template must not reach the methods of other objects."""
    if value is None or type(value) in (str, ComposedText, int, float, bool):
        return value
    for base in (str, int, float):
        if isinstance(value, base):
            return base(value)
    if isinstance(value, Mapping):
        return {_plain(key): _plain(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return (tuple if isinstance(value, tuple) else list)(map(_plain, value))
    return f"<{type(value).__name__}>"


def _strings(value: Any) -> list[str]:
    """Return the strings that `_map_strings` changes."""
    found = list[str]()

    def keep(string: str) -> str:
        found.append(string)
        return string

    _map_strings(value, keep)
    return found


def _map_strings(value: Any, change: Callable[[str], str]) -> Any:
    """Return the value with each string changed, including keys, but without our own parts of texts.

    A template that looks up a changed key finds nothing, which the rendered text shows.
    """
    if isinstance(value, ComposedText):
        return value.with_changes(change)
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {_map_strings(key, change): _map_strings(item, change) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_map_strings(item, change) for item in value)
    return value


def _unused_character(text: str) -> str:
    used = set(text)
    for code in _PRIVATE_USE_CHARACTERS:
        if chr(code) not in used:
            return chr(code)
    raise InvalidRequestError("the conversation uses every private-use character: remove some")
