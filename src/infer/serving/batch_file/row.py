"""A line of the input: a plain row, or one of OpenAI's batch format.

    {"id": "a", "prompt": "Once", "temperature": 0}
    {"id": "b", "messages": [{"role": "user", "content": "Hi"}], "max_new_tokens": 64}
    {"custom_id": "c", "method": "POST", "url": "/v1/chat/completions", "body": {"messages": [...]}}

A plain row without an id is named after its line.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from infer.errors import InvalidRequestError
from infer.serving.protocols.fields import Complete, Reading, as_given, body_from, refuse
from infer.serving.protocols.openai.ask import ChatBody, CompletionBody, complete_chat
from infer.serving.protocols.params import prompts_of, refuse_unless_neutral
from infer.serving.protocols.retrieval import ClassifyBody, EmbeddingsBody, RerankBody
from infer.system.json_limits import JsonLimitError, RepeatedKeyError, check_limits, unique_keys

_TOOL_OPTIONS = ("tools", "tool_choice", "parallel_tool_calls", "tool_format", "reasoning_format", "reasoning_budget")
TextsBody = EmbeddingsBody | RerankBody | ClassifyBody
_BODIES: Mapping[str, tuple[type[Any], Complete]] = {
    "/v1/chat/completions": (ChatBody, complete_chat),
    "/v1/completions": (CompletionBody, as_given),
    "/v1/embeddings": (EmbeddingsBody, as_given),
    "/v1/rerank": (RerankBody, as_given),
    "/v1/classify": (ClassifyBody, as_given),
}
ENDPOINTS = tuple(_BODIES)
# Fields of a body that a line cannot answer, with the values that have no effect and are accepted.
_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    **dict.fromkeys(("stream", "echo", "return_token_ids"), (False,)),
    "n": (1,),
    "suffix": ("",),
    "prompt_logprobs": (),
}


class Row(NamedTuple):
    """A request. `endpoint` is None for a plain row, whose `options` are fields of RequestOptions.

    Another row has the `body` that its route reads. `problem` says why the row cannot be answered.
    """

    id: str
    endpoint: str | None = None
    body: ChatBody | CompletionBody | TextsBody | None = None
    prompt: str | Sequence[int] | Sequence[Mapping[str, Any]] = ""
    values: Mapping[str, Any] = {}
    options: Mapping[str, Any] = {}
    warnings: tuple[str, ...] = ()
    problem: str | None = None


def read_rows(lines: Iterable[str]) -> Iterator[Row]:
    """Return the rows of the lines, without empty lines and the byte order marks that some editors write."""
    unmarked = (line.removeprefix("\ufeff") for line in lines)
    return (read_row(line, f"line {number}") for number, line in enumerate(unmarked, 1) if line.strip())


def read_row(line: str, name: str) -> Row:
    """Return the row of a line. `name` is the id of a row that has none."""
    try:
        check_limits(line)
        record = json.loads(line, object_pairs_hook=unique_keys)
    except JsonLimitError as error:
        return Row(name, problem=f"the row is {error}")
    except RepeatedKeyError as error:
        return Row(name, problem=str(error))
    except ValueError as error:
        return Row(name, problem=f"not JSON: {error}")
    if not isinstance(record, dict):
        return Row(name, problem=f"a row must be an object, got {line.strip():.60}")
    return row_of(record, name)


def row_of(record: dict[str, Any], name: str) -> Row:
    """Return the row of a line's JSON. `name` is the id of a row that has none."""
    is_plain = "custom_id" not in record
    named = record.get("id", name) if is_plain else record["custom_id"]
    row_id = str(named) if type(named) in (str, int) else name
    endpoint = None if is_plain else ENDPOINTS[0]
    try:
        if row_id != str(named) or not row_id or not _is_text(row_id):
            row_id = name
            raise InvalidRequestError(f"an id must be a whole number or a text with characters, got {named!r:.60}")
        if is_plain:
            return _plain(row_id, record)
        if (url := record.get("url")) not in ENDPOINTS:
            raise InvalidRequestError(f"url must be {' or '.join(ENDPOINTS)}, got {url!r:.60}")
        return _of_openai(row_id, url, record)
    except InvalidRequestError as error:
        return Row(row_id, endpoint, problem=str(error))
    except (UnicodeEncodeError, msgspec.DecodeError):
        return Row(row_id, endpoint, problem="the row has half of a surrogate pair, which is not text")


def _is_text(text: str) -> bool:
    """Return False for text with half a surrogate pair, which no UTF-8 file contains."""
    return not any("\ud800" <= character <= "\udfff" for character in text)


def _plain(row_id: str, record: dict[str, Any]) -> Row:
    others = ("id", "prompt", "messages", *_TOOL_OPTIONS)
    values = {name: value for name, value in record.items() if name not in others}
    options = {name: record[name] for name in _TOOL_OPTIONS if name in record}
    prompts = [record[name] for name in ("prompt", "messages") if name in record]
    if len(prompts) != 1 or not isinstance(prompts[0], str | list):
        raise InvalidRequestError('a row must have either "prompt", a text or ids, or "messages", a list')
    if record.get("messages") == []:
        raise InvalidRequestError("messages must hold at least one message, got none")
    return Row(row_id, None, None, prompts[0], values, options)


def _of_openai(row_id: str, endpoint: str, record: dict[str, Any]) -> Row:
    if record.get("method", "POST") != "POST":
        raise InvalidRequestError(f"method must be 'POST', got {record['method']!r:.60}")
    body = record.get("body")
    if not isinstance(body, dict):
        raise InvalidRequestError(f"body must be an object, got {body!r:.60}")
    kind, complete = _BODIES[endpoint]
    reading = Reading()
    read = body_from(body, kind, complete, reading)
    refuse_unless_neutral(read, _NEUTRAL)
    for name in ("max_tokens", "max_completion_tokens"):
        if getattr(read, name, None) == 0:
            raise refuse(f"{name} must be at least 1 in a row, or -1 for the whole context, got 0", name)
    if isinstance(read, CompletionBody) and (count := len(prompts_of(read.prompt))) != 1:
        raise refuse(f"a row must have one prompt, got {count}: write one row per prompt", "prompt")
    return Row(row_id, endpoint, read, warnings=tuple(reading.warnings))
