"""Requests of every kind, and the sum of their answers' events, because each run cuts tokens into other events."""

import json
import re
from collections.abc import Iterator
from typing import Any

# The template opens the reasoning if the request asks for it.
TEMPLATE = (
    "{% for message in messages %}[{{ message.role }}]"
    "{% if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}"
    "{{ message.content }}{% endfor %}[assistant]{{ '<think>' if enable_thinking else '' }}"
)
_ASKED = [{"role": "user", "content": "Which colours has the sea in the evening, and is the lamp on?"}]
_SAMPLED: dict[str, Any] = {"seed": 3, "temperature": 1.2, "ignore_eos": True}
_PARAMETERS = {"type": "object", "properties": {"flag": {"type": "boolean"}, "why": {"type": "string"}}}
_TOOL = {"name": "is_on", "parameters": _PARAMETERS | {"required": ["flag", "why"]}}
_TOOLS = {"tools": [{"type": "function", "function": _TOOL}], "tool_choice": "required", "parallel_tool_calls": False}
_SCHEMA = {"type": "array", "items": {"enum": ["red", "blue", 3, True]}, "minItems": 12, "maxItems": 40}
_HELD = {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": _SCHEMA}}}
_THINKING = {"chat_template_kwargs": {"enable_thinking": True}, "thinking_token_budget": 20}
_USAGE = {"stream_options": {"include_usage": True}}
_CHAT, _TEXT, _RESPONSES, _MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"


def cases(num_tokens: int) -> dict[str, tuple[str, dict[str, Any]]]:
    """Return the route and body of each case: streams, and answers that are not streamed."""
    chat = {"messages": _ASKED, "max_tokens": num_tokens, **_SAMPLED}
    response = {"input": "Which colours?", "max_output_tokens": num_tokens, **_SAMPLED}
    message = {"messages": _ASKED, "max_tokens": num_tokens, "seed": 3}
    text = {"prompt": ["Once", "Twice"], "n": 2, "max_tokens": num_tokens // 2, **_SAMPLED}
    tool = {"name": "is_on", "input_schema": _TOOL["parameters"]}
    found = {
        "greedy": (_CHAT, chat | {"temperature": 0}),
        "sampled": (_CHAT, chat | {"frequency_penalty": 0.5, "top_p": 0.95} | _USAGE),
        "log-probabilities": (_CHAT, chat | {"logprobs": True, "top_logprobs": 3}),
        "token ids": (_CHAT, chat | {"return_token_ids": True}),
        "choices": (_CHAT, chat | {"n": 3} | _USAGE),
        "schema": (_CHAT, chat | _HELD),
        "tools": (_CHAT, chat | _TOOLS),
        "reasoning": (_CHAT, chat | _THINKING | _USAGE),
        "completions": (_TEXT, text | {"logprobs": 2, "echo": True} | _USAGE),
        "stop": (_TEXT, text | {"stop": ["e", "a "], "min_tokens": num_tokens // 3}),
        "response": (_RESPONSES, response | {"reasoning": {"effort": "high"}, "thinking_token_budget": 20}),
        "response with log-probabilities": (_RESPONSES, response | {"include": ["message.output_text.logprobs"]}),
        "message": (_MESSAGES, message),
        "message with tools": (_MESSAGES, message | {"tools": [tool], "tool_choice": {"type": "any"}}),
    }
    whole = {f"whole {name}": found[name] for name in ("sampled", "tools", "completions", "response", "message")}
    streams = {name: (path, body | {"stream": True}) for name, (path, body) in found.items()}
    return streams | {name: (path, _without_stream_options(body)) for name, (path, body) in whole.items()}


def _without_stream_options(body: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in body.items() if name != "stream_options"}


# The sum of a stream

_TEXTS = {"content", "text", "delta", "arguments", "reasoning_content", "thinking", "partial_json"}
# Fields that differ between runs: times, and counts of the cache and of drafts.
_VARYING = {
    *("ttft_seconds", "decode_seconds", "decode_tokens_per_second", "sequence_number", "token_origins"),
    *("cached_tokens", "accepted_prediction_tokens", "rejected_prediction_tokens"),
    *("input_tokens", "cache_read_input_tokens"),
}
_NUMBER = re.compile(r'"(?:chatcmpl-|cmpl-|resp_|msg_)([0-9a-f]{24})"')
_CREATED = re.compile(r'"created(?:_at)?":\d+')


def merged(text: str) -> dict[str, Any]:
    """Return the sum of an answer's events, without its number and time if they are those of its first event."""
    if number := _NUMBER.search(text):
        text = text.replace(number[1], "N")
    if created := _CREATED.search(text):
        text = text.replace(created[0], '"created":0')
    adding = dict[str, Any]()
    for event in _json_events(text):
        place = event.get("type", event.get("object", "")), event.get("item_id", event.get("index", ""))
        key = "/".join(map(str, place))
        adding[key] = _merge("", adding.get(key), event)
    return adding


def _json_events(text: str) -> Iterator[dict[str, Any]]:
    """Yield the events of a stream, errors included, or an answer that is not streamed as one event."""
    if text.startswith("{"):
        yield json.loads(text)
    for line in text.splitlines():
        if line.startswith("data: {"):
            yield json.loads(line.removeprefix("data: "))


def _merge(name: str, old: Any, new: Any) -> Any:
    if isinstance(new, dict):
        kept = old if isinstance(old, dict) else {}
        return kept | {key: _merge(key, kept.get(key), new[key]) for key in new if key not in _VARYING}
    if isinstance(new, list):
        return _merge_lists(old or [], new)
    if isinstance(old, str) and isinstance(new, str) and name in _TEXTS:
        return old + new
    return old if new is None else new


def _merge_lists(old: list[Any], new: list[Any]) -> list[Any]:
    """Merge entries of the same index. In log-probabilities, an "index" can be a token."""
    if not (new and isinstance(new[0], dict) and isinstance(new[0].get("index"), int)):
        return old + [_merge("", None, each) for each in new]
    by_index = {each["index"]: each for each in old}
    for each in new:
        by_index[each["index"]] = _merge("", by_index.get(each["index"]), each)
    return [by_index[index] for index in sorted(by_index)]
