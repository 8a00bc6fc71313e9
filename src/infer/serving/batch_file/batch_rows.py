"""The rows of a batch file, plain ones and those of OpenAI's batch format, and the lines that answer them.

    {"id": "a", "prompt": "Once", "temperature": 0}
    {"id": "b", "messages": [{"role": "user", "content": "Hi"}], "max_new_tokens": 64}
    {"custom_id": "c", "method": "POST", "url": "/v1/chat/completions", "body": {"messages": [...]}}

A plain row without an id is named after its line. The same row always gives the same bytes, independent of time and
chance. This loads no torch, because the process that writes the lines needs none.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from threading import Event
from typing import Any, NamedTuple, final

import msgspec

from infer.engine.texts.text_ids import TextIds
from infer.errors import InvalidRequestError
from infer.outputs import GenerationResult, finite
from infer.serving.protocols.bodies import prompts_of, refuse_unless_neutral
from infer.serving.protocols.events import Spelling
from infer.serving.protocols.fields import Reading, body_from, refuse
from infer.serving.protocols.openai.ask import ChatBody, CompletionBody
from infer.serving.protocols.openai.events import finish_reason_of, message_of
from infer.serving.protocols.retrieval import ClassifyBody, EmbeddingsBody, RerankBody
from infer.system.json_limits import JsonLimitError, RepeatedKeyError, check_limits, unique_keys

_TOOL_OPTIONS = ("tools", "tool_choice", "parallel_tool_calls", "tool_format", "reasoning_format", "reasoning_budget")
TextsBody = EmbeddingsBody | RerankBody | ClassifyBody
_BODIES: Mapping[str, type[Any]] = {
    "/v1/chat/completions": ChatBody,
    "/v1/completions": CompletionBody,
    "/v1/embeddings": EmbeddingsBody,
    "/v1/rerank": RerankBody,
    "/v1/classify": ClassifyBody,
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
            return _plain_row(row_id, record)
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


def _plain_row(row_id: str, record: dict[str, Any]) -> Row:
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
    reading = Reading()
    read = body_from(body, _BODIES[endpoint], reading)
    refuse_unless_neutral(read, _NEUTRAL)
    for name in ("max_tokens", "max_completion_tokens"):
        if getattr(read, name, None) == 0:
            raise refuse(f"{name} must be at least 1 in a row, or -1 for the whole context, got 0", name)
    if isinstance(read, CompletionBody) and (count := len(prompts_of(read.prompt))) != 1:
        raise refuse(f"a row must have one prompt, got {count}: write one row per prompt", "prompt")
    return Row(row_id, endpoint, read, warnings=tuple(reading.warnings))


class Line(NamedTuple):
    """The line that is written for a row."""

    row_id: str
    text: str
    has_failed: bool


Write = Callable[[Line], None]
# Fields of a result that every plain line has.
_SHOWN = ("text", "finish_reason", "stop_reason", "prompt_tokens", "generated_tokens", "seed")


@final
@dataclass(frozen=True)
class BatchSettings:
    """The settings of a run. `model` is the model's name in the lines.

    `values` are fields of `SamplingParams`, for rows that do not set them.
    """

    model: str
    seed: int
    batch_size: int
    values: Mapping[str, Any]
    cancel: Event | None = None


def result_line(row: Row, result: GenerationResult, model: str, spelling: Spelling) -> Line:
    if result.finish_reason == "error":
        return error_line(row, str(result.stop_reason), str(result.error), model)
    if row.endpoint is None:
        return Line(row.id, _json(_plain_record(row, result, model)), has_failed=False)
    finish_reason = finish_reason_of(result)
    body: dict[str, Any] = {
        "id": _named("cmpl", row.id),
        "object": "chat.completion" if row.endpoint == ENDPOINTS[0] else "text_completion",
        "created": 0,
        "model": model,
        "choices": [{"index": 0, **_content(row, result, spelling), "finish_reason": finish_reason}],
        "usage": {
            "prompt_tokens": result.prompt_tokens,
            "completion_tokens": result.generated_tokens,
            "total_tokens": result.prompt_tokens + result.generated_tokens,
        },
    }
    return _answered(row, body, result.warnings)


def texts_line(row: Row, items: list[Any], texts: TextIds, model: str) -> Line:
    """Return the line of a row that requested vectors, scores or labels of texts, which are the items."""
    kind = str(row.endpoint).removeprefix("/v1/")
    head = {"object": "list"} if kind == "embeddings" else {"id": _named(kind, row.id)}
    field = "results" if kind == "rerank" else "data"
    usage = {"prompt_tokens": texts.num_tokens, "total_tokens": texts.num_tokens}
    warnings = [*row.warnings, *([texts.warning] if texts.warning else [])]
    return _answered(row, {**head, "model": model, field: items, "usage": usage}, warnings)


def _answered(row: Row, body: dict[str, Any], warnings: Sequence[str]) -> Line:
    if warnings:
        body["infer"] = {"warnings": list(warnings)}
    response = {"status_code": 200, "request_id": _named("req", row.id), "body": body}
    record = {"id": _named("batch_req", row.id), "custom_id": row.id, "response": response, "error": None}
    return Line(row.id, _json(record), has_failed=False)


def refusal_line(row: Row, error: InvalidRequestError, model: str) -> Line:
    return error_line(row, "invalid_request", str(error), model)


def error_line(row: Row, code: str, message: str, model: str) -> Line:
    record: dict[str, Any] = {"id": row.id, "model": model}
    if row.endpoint is not None:
        record = {"id": _named("batch_req", row.id), "custom_id": row.id, "response": None}
    return Line(row.id, _json(record | {"error": {"code": code, "message": message}}), has_failed=True)


def _plain_record(row: Row, result: GenerationResult, model: str) -> dict[str, Any]:
    shown = {name: getattr(result, name) for name in _SHOWN}
    record: dict[str, Any] = {"id": row.id, "model": model, **shown}
    if result.reasoning is not None:
        record["reasoning"] = result.reasoning
    if result.tool_calls:
        record["tool_calls"] = [call.to_json() for call in result.tool_calls]
    if result.warnings:
        record["warnings"] = list(result.warnings)
    if result.logprobs is not None:
        record["logprobs"] = [
            {"token_id": each.token_id, "logprob": finite(each.logprob), "rank": each.rank,
             "top": [[token_id, finite(logprob)] for token_id, logprob in each.top]}
            for each in result.logprobs
        ]  # fmt: skip
    return record


def _content(row: Row, result: GenerationResult, spelling: Spelling) -> dict[str, Any]:
    if row.endpoint != ENDPOINTS[0]:
        columns = None if result.logprobs is None else spelling.completion_columns(result.logprobs)
        return {"text": result.text, "logprobs": columns}
    scored = None if result.logprobs is None else {"content": spelling.chat_entries(result), "refusal": None}
    return {"message": message_of(result), "logprobs": scored}


def _named(kind: str, row_id: str) -> str:
    return f"{kind}-{hashlib.blake2b(row_id.encode(), digest_size=12).hexdigest()}"


def _json(record: dict[str, Any]) -> str:
    return json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n"
