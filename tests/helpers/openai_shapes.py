"""Check answers of a server against OpenAI's own schemas, which are in `data/` with their licence (MIT)."""

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from jsonschema import Draft202012Validator

DATA = Path(__file__).parents[1] / "data" / "openai-schemas.json"


@cache
def _components() -> dict[str, Any]:
    """Return OpenAI's schemas, with the nulls that OpenAI sends although its schemas lack them.

    Nulls are the log-probability of an echoed prompt's first token, and fields that only the last chunk fills.
    """
    components = json.loads(DATA.read_text(encoding="utf-8"))["components"]
    schemas = components["schemas"]
    completion = schemas["CreateCompletionResponse"]["properties"]
    choice = completion["choices"]["items"]["properties"]
    logprobs = choice["logprobs"]["anyOf"][0]["properties"]
    for name in ("token_logprobs", "top_logprobs"):
        logprobs[name]["items"] = _or_null(logprobs[name]["items"])
    chunk = json.loads(json.dumps(schemas["CreateCompletionResponse"]))
    chunk["properties"]["usage"] = _or_null(chunk["properties"]["usage"])
    of_choice = chunk["properties"]["choices"]["items"]["properties"]
    of_choice["finish_reason"] = _or_null(of_choice["finish_reason"])
    schemas["CompletionChunk"] = chunk
    return components


def _or_null(schema: Any) -> Any:
    return {"anyOf": [schema, {"type": "null"}]}


@cache
def validator(name: str) -> Draft202012Validator:
    return Draft202012Validator({"$ref": f"#/components/schemas/{name}", "components": _components()})


def check(name: str, value: Any) -> None:
    """Check that the value is valid for the schema of this name."""
    found = [f"{error.json_path}: {error.message:.300}" for error in validator(name).iter_errors(value)]
    assert not found, (name, found[:3])


def counts_of(usage: dict[str, Any]) -> list[int]:
    """Return the tokens of the prompt, of the answers, and of both."""
    return [usage[name] for name in ("prompt_tokens", "completion_tokens", "total_tokens")]


def events(stream: str) -> Iterator[Any]:
    """Yield the data of a stream of events, which ends in [DONE]."""
    blocks = [block for block in stream.split("\n\n") if block and not block.startswith(":")]
    assert blocks[-1] == "data: [DONE]"
    for block in blocks[:-1]:
        assert block.startswith("data: "), block
        yield json.loads(block.removeprefix("data: "))


def named_events(stream: str) -> Iterator[Any]:
    """Yield the data of the named events of `/v1/responses`, which are numbered and do not end in [DONE]."""
    for number, block in enumerate(filter(None, stream.split("\n\n"))):
        name, data = block.split("\n")
        found = json.loads(data.removeprefix("data: "))
        assert (f"event: {found['type']}", found["sequence_number"]) == (name, number)
        yield found
