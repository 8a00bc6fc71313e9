"""The line that answers a row, and the settings that all rows of a run share.

The same row always gives the same bytes, independent of time and chance. This loads no torch, because the process that
writes the lines needs none.
"""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from threading import Event
from typing import Any, NamedTuple, final

from infer.errors import InvalidRequestError
from infer.outputs import GenerationResult, finite
from infer.serving.batch_file.row import ENDPOINTS, Row
from infer.serving.protocols.answers import (
    Spelling,
    chat_entries,
    completion_columns,
    finish_reason_of,
    message_of,
    without_end,
)


class Line(NamedTuple):
    """The line that is written for a row."""

    row_id: str
    text: str
    has_failed: bool


Write = Callable[[Line], None]


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
        return Line(row.id, _json(_plain(row, result, model)), has_failed=False)
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


def texts_line(row: Row, values: dict[str, Any], num_tokens: int, model: str, warnings: Sequence[str]) -> Line:
    """Return the line of a row that requested vectors, scores or labels. `values` are these fields of the answer."""
    kind = str(row.endpoint).removeprefix("/v1/")
    head = {"object": "list"} if kind == "embeddings" else {"id": _named(kind, row.id)}
    usage = {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
    return _answered(row, {**head, "model": model, **values, "usage": usage}, warnings)


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


def _plain(row: Row, result: GenerationResult, model: str) -> dict[str, Any]:
    record: dict[str, Any] = {
        "id": row.id,
        "model": model,
        "text": result.text,
        "finish_reason": result.finish_reason,
        "stop_reason": result.stop_reason,
        "prompt_tokens": result.prompt_tokens,
        "generated_tokens": result.generated_tokens,
        "seed": result.seed,
    }
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
    logprobs = result.logprobs
    if row.endpoint != ENDPOINTS[0]:
        return {"text": result.text, "logprobs": None if logprobs is None else completion_columns(logprobs, spelling)}
    if logprobs is not None:
        entries = chat_entries(without_end(logprobs, result.finish_reason), spelling)
    return {
        "message": message_of(result),
        "logprobs": None if logprobs is None else {"content": entries, "refusal": None},
    }


def _named(kind: str, row_id: str) -> str:
    return f"{kind}-{hashlib.blake2b(row_id.encode(), digest_size=12).hexdigest()}"


def _json(record: dict[str, Any]) -> str:
    return json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n"
