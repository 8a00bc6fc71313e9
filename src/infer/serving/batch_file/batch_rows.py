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


class Line(NamedTuple):
    """The line that is written for a row."""

    row_id: str
    text: str
    has_failed: bool


Write = Callable[[Line], None]
# Fields of a result that every plain line has.
_SHOWN = ("text", "finish_reason", "stop_reason", "prompt_tokens", "generated_tokens", "seed")


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

    def result_line(self, result: GenerationResult, model: str, spelling: Spelling) -> Line:
        if result.finish_reason == "error":
            return self.error_line(str(result.stop_reason), str(result.error), model)
        if self.endpoint is None:
            return Line(self.id, _json({"id": self.id, "model": model} | _plain_record(result)), has_failed=False)
        is_chat, finish_reason = self.endpoint == ENDPOINTS[0], finish_reason_of(result)
        content = _message(result, spelling) if is_chat else _text(result, spelling)
        body: dict[str, Any] = {
            "id": self._named("cmpl"),
            "object": "chat.completion" if is_chat else "text_completion",
            "created": 0,
            "model": model,
            "choices": [{"index": 0, **content, "finish_reason": finish_reason}],
            "usage": {
                "prompt_tokens": result.prompt_tokens,
                "completion_tokens": result.generated_tokens,
                "total_tokens": result.prompt_tokens + result.generated_tokens,
            },
        }
        return self._answered(body, result.warnings)

    def texts_line(self, items: list[Any], texts: TextIds, model: str) -> Line:
        """Return the line of a row that requested vectors, scores or labels of texts, which are the items."""
        kind = str(self.endpoint).removeprefix("/v1/")
        head = {"object": "list"} if kind == "embeddings" else {"id": self._named(kind)}
        field = "results" if kind == "rerank" else "data"
        usage = {"prompt_tokens": texts.num_tokens, "total_tokens": texts.num_tokens}
        warnings = [*self.warnings, *([texts.warning] if texts.warning else [])]
        return self._answered({**head, "model": model, field: items, "usage": usage}, warnings)

    def refusal_line(self, error: InvalidRequestError, model: str) -> Line:
        return self.error_line("invalid_request", str(error), model)

    def error_line(self, code: str, message: str, model: str) -> Line:
        record: dict[str, Any] = {"id": self.id, "model": model}
        if self.endpoint is not None:
            record = {"id": self._named("batch_req"), "custom_id": self.id, "response": None}
        return Line(self.id, _json(record | {"error": {"code": code, "message": message}}), has_failed=True)

    def _answered(self, body: dict[str, Any], warnings: Sequence[str]) -> Line:
        if warnings:
            body["infer"] = {"warnings": list(warnings)}
        response = {"status_code": 200, "request_id": self._named("req"), "body": body}
        record = {"id": self._named("batch_req"), "custom_id": self.id, "response": response, "error": None}
        return Line(self.id, _json(record), has_failed=False)

    def _named(self, kind: str) -> str:
        return f"{kind}-{hashlib.blake2b(self.id.encode(), digest_size=12).hexdigest()}"


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


def _plain_record(result: GenerationResult) -> dict[str, Any]:
    record = {name: getattr(result, name) for name in _SHOWN}
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


def _text(result: GenerationResult, spelling: Spelling) -> dict[str, Any]:
    columns = None if result.logprobs is None else spelling.completion_columns(result.logprobs)
    return {"text": result.text, "logprobs": columns}


def _message(result: GenerationResult, spelling: Spelling) -> dict[str, Any]:
    scored = None if result.logprobs is None else {"content": spelling.chat_entries(result), "refusal": None}
    return {"message": message_of(result), "logprobs": scored}


def _json(record: dict[str, Any]) -> str:
    return json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n"
