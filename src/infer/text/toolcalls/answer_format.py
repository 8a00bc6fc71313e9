"""The parts of an answer besides text, as a value of its request: reasoning first, then text, then calls."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, final

from infer.text.toolcalls.formats import ReasoningFormat, ToolCallFormat
from infer.text.toolcalls.tools import Kind, Tool

_SHORT_ALPHABET = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
_SHORT_LENGTH = 9


@final
@dataclass(frozen=True)
class Calls:
    """Calls of these tools in this format, in the vocabulary of the tokenizer."""

    form: ToolCallFormat
    tools: tuple[Tool, ...]
    kind: Kind = "auto"
    is_parallel: bool = True

    @property
    def beginnings(self) -> list[str]:
        """Beginnings of calls, which distinguish calls from text."""
        if self.form.trigger:
            return [self.form.trigger]
        return self.form.beginnings([tool.name for tool in self.tools])


@final
@dataclass(frozen=True)
class AnswerFormat:
    """Format of an answer.

    `marks` represent control tokens, by their ids. Reasoning `is_open` if the prompt has begun it. If it is not
    `is_apart`, it is a part of the text. After `budget` tokens the reasoning is closed. `warnings` name the parts of
    tools' schemas that are not enforced.
    """

    calls: Calls | None = None
    reasoning: ReasoningFormat | None = None
    is_open: bool = False
    is_apart: bool = True
    budget: int | None = None
    marks: Mapping[int, str] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()

    @property
    def calls_in_reasoning(self) -> list[str]:
        """Beginnings of calls that end the reasoning like its closing, one per tool; [] if none does.

        With a budget, only the closing ends the reasoning.
        """
        calls = self.calls
        if calls is None or calls.kind == "none" or not calls.form.ends_reasoning or self.budget is not None:
            return []
        return [calls.form.start + tool.name + calls.form.before_arguments for tool in calls.tools]

    def call_id(self, salt: bytes, index: int) -> str:
        """Return the id of a call: equal for equal requests, different for other requests and calls."""
        digest = blake2b(salt + index.to_bytes(4, "little"), digest_size=12)
        if self.calls is None or not self.calls.form.has_short_ids:
            return f"call_{digest.hexdigest()}"
        number, letters = int.from_bytes(digest.digest(), "little"), ""
        for _ in range(_SHORT_LENGTH):
            number, place = divmod(number, len(_SHORT_ALPHABET))
            letters += _SHORT_ALPHABET[place]
        return letters


def is_plain_text(schema: Any) -> bool:
    """Return True if every value that the schema describes is a text."""
    if not isinstance(schema, Mapping):
        return False
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if isinstance(values, list | tuple):
        return all(isinstance(value, str) for value in values)
    return schema.get("type") == "string"


def written_arguments(form: ToolCallFormat, tool: Tool | None, arguments: Mapping[str, Any]) -> str:
    """Return arguments in the syntax of the format."""
    if form.syntax == "json":
        return json.dumps(arguments, ensure_ascii=False)
    if form.syntax == "python":
        return ", ".join(f"{name}={written_value(value)}" for name, value in arguments.items())
    if form.syntax == "gemma":
        return gemma_value(arguments, form.quote)[1:-1]
    properties = {} if tool is None else tool.properties
    return "".join(
        form.before_key
        + name
        + form.after_key
        + (value if is_plain_text(properties.get(name)) else json.dumps(value, ensure_ascii=False))
        + form.after_value
        for name, value in arguments.items()
    )


def written_value(value: Any) -> str:
    """Return a value as Python writes it, but with texts as in JSON."""
    if isinstance(value, Mapping):
        return (
            "{" + ", ".join(f"{json.dumps(k, ensure_ascii=False)}: {written_value(v)}" for k, v in value.items()) + "}"
        )
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(written_value, value)) + "]"
    if value is None or isinstance(value, bool):
        return str(value)
    return json.dumps(value, ensure_ascii=False)


def gemma_value(value: Any, quote: str) -> str:
    """Return a value as JSON without spaces, but with names and texts in Gemma's form."""
    match value:
        case str():
            return f"{quote}{value}{quote}"
        case Mapping():
            return "{" + ",".join(f"{name}:{gemma_value(each, quote)}" for name, each in value.items()) + "}"
        case list() | tuple():
            return f"[{','.join(gemma_value(each, quote) for each in value)}]"
    return json.dumps(value)
