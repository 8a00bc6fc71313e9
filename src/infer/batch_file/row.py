"""A line of the input: a plain row, or one of OpenAI's batch format.

    {"id": "a", "prompt": "Once", "temperature": 0}
    {"id": "b", "messages": [{"role": "user", "content": "Hi"}], "max_new_tokens": 64}
    {"custom_id": "c", "method": "POST", "url": "/v1/chat/completions", "body": {"messages": [...]}}

A plain row without an id is named after its line.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from infer.batch_file.openai_body import TOOL_OPTIONS, options_of_body, params_of_body, prompt_of_body
from infer.errors import InvalidRequestError

Endpoint = Literal["/v1/chat/completions", "/v1/completions"]
ENDPOINTS: tuple[Endpoint, ...] = ("/v1/chat/completions", "/v1/completions")


class Row(NamedTuple):
    """A request. `endpoint` is None for a plain row. `options` are those for tools and reasoning.

    `problem` says why the row cannot be answered.
    """

    id: str
    endpoint: Endpoint | None = None
    prompt: str | Sequence[int] | Sequence[Mapping[str, Any]] = ""
    values: Mapping[str, Any] = {}
    options: Mapping[str, Any] = {}
    problem: str | None = None


def read_rows(lines: Iterable[str]) -> Iterator[Row]:
    """Return the rows of the lines, without empty lines and the byte order marks that some editors write."""
    unmarked = (line.removeprefix("\ufeff") for line in lines)
    return (read_row(line, f"line {number}") for number, line in enumerate(unmarked, 1) if line.strip())


def seed_of(seed: int, row_id: str) -> int:
    """Return the seed of a row that has none: 64 bits of a hash, the same in every process."""
    return int.from_bytes(hashlib.blake2b(f"{seed}\0{row_id}".encode(), digest_size=8).digest(), "little")


def read_row(line: str, name: str) -> Row:
    """Return the row of a line. `name` is the id of a row that has none."""
    try:
        record = json.loads(line, object_pairs_hook=_unique)
    except InvalidRequestError as error:
        return Row(name, problem=str(error))
    except (ValueError, RecursionError) as error:
        return Row(name, problem=f"not JSON: {error}")
    if not isinstance(record, dict):
        return Row(name, problem=f"a row must be an object, got {line.strip():.60}")
    return row_of(record, name)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        doubled = next(name for name in names if names.count(name) > 1)
        raise InvalidRequestError(f"the key {doubled!r:.60} appears twice: give it once")
    return found


def row_of(record: dict[str, Any], name: str) -> Row:
    """Return the row of a line's JSON. `name` is the id of a row that has none."""
    is_plain = "custom_id" not in record
    named = record.get("id", name) if is_plain else record["custom_id"]
    row_id = str(named) if type(named) in (str, int) else name
    endpoint: Endpoint | None = None if is_plain else ENDPOINTS[0]
    try:
        if row_id != str(named) or not row_id or not _is_text(row_id):
            row_id = name
            raise InvalidRequestError(f"an id must be a text that is not empty, or a whole number, got {named!r:.60}")
        if is_plain:
            return _plain(row_id, record)
        endpoint = _endpoint(record)
        return _of_openai(row_id, endpoint, record)
    except InvalidRequestError as error:
        return Row(row_id, endpoint, problem=str(error))


def _is_text(text: str) -> bool:
    """Return False for text with half a surrogate pair, which no UTF-8 file contains."""
    return not any("\ud800" <= character <= "\udfff" for character in text)


def _plain(row_id: str, record: dict[str, Any]) -> Row:
    others = ("id", "prompt", "messages", *TOOL_OPTIONS)
    values = {name: value for name, value in record.items() if name not in others}
    options = {name: record[name] for name in TOOL_OPTIONS if name in record}
    prompts = [record[name] for name in ("prompt", "messages") if name in record]
    if len(prompts) != 1 or not isinstance(prompts[0], str | list):
        raise InvalidRequestError('a row needs "prompt", a text or ids, or "messages", a list: one of the two')
    if record.get("messages") == []:
        raise InvalidRequestError("messages must hold at least one message, got none")
    return Row(row_id, None, prompts[0], values, options)


def _endpoint(record: dict[str, Any]) -> Endpoint:
    for endpoint in ENDPOINTS:
        if record.get("url") == endpoint:
            return endpoint
    raise InvalidRequestError(f"url must be {' or '.join(ENDPOINTS)}, got {record.get('url')!r:.60}")


def _of_openai(row_id: str, endpoint: Endpoint, record: dict[str, Any]) -> Row:
    if record.get("method", "POST") != "POST":
        raise InvalidRequestError(f"method must be 'POST', got {record['method']!r:.60}")
    body = record.get("body")
    if not isinstance(body, dict):
        raise InvalidRequestError(f"body must be an object, got {body!r:.60}")
    is_chat = endpoint == ENDPOINTS[0]
    prompt, values = prompt_of_body(body, is_chat=is_chat), params_of_body(body, is_chat=is_chat)
    return Row(row_id, endpoint, prompt, values, options_of_body(body) if is_chat else {})
