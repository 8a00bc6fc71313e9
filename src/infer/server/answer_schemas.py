"""JSON schemas of the routes' answers. Every named property is present unless it is optional; there may be others."""

from collections.abc import Mapping
from typing import Any

Schema = dict[str, Any]

TEXT: Schema = {"type": "string"}
COUNT: Schema = {"type": "integer", "minimum": 0}
NUMBER: Schema = {"type": "number"}
INTEGER: Schema = {"type": "integer"}


def listed(items: Schema) -> Schema:
    return {"type": "array", "items": items}


def nullable(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


def constant(*values: str) -> Schema:
    return {"type": "string", "enum": list(values)}


def record(optional: Mapping[str, Schema] | None = None, **properties: Schema) -> Schema:
    """Return the schema of an object. Its properties are required unless they are in `optional`."""
    return {"type": "object", "properties": {**properties, **(optional or {})}, "required": list(properties)}


def ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


_FINISH = constant("stop", "length")
_CHAT_FINISH = constant("stop", "length", "tool_calls")
_CALL_STATUS = constant("completed", "incomplete")
_TOOL_CALL = record(id=TEXT, type=constant("function"), function=record(name=TEXT, arguments=TEXT))
_BESIDE_TEXT: dict[str, Schema] = {"reasoning_content": TEXT, "tool_calls": listed(_TOOL_CALL)}
_CHAT_MESSAGE = record(
    _BESIDE_TEXT,
    role=constant("assistant"),
    content=nullable(TEXT),
    refusal={"type": "null"},
)
_OUTPUT_ITEMS: list[Schema] = [
    record(
        id=TEXT,
        type=constant("message"),
        role=constant("assistant"),
        status=_CALL_STATUS,
        content=listed(record(type=constant("output_text"), text=TEXT, annotations=listed({}))),
    ),
    record(id=TEXT, type=constant("function_call"), call_id=TEXT, name=TEXT, arguments=TEXT, status=_CALL_STATUS),
    record(
        id=TEXT,
        type=constant("reasoning"),
        summary=listed({}),
        content=listed(record(type=constant("reasoning_text"), text=TEXT)),
        status=_CALL_STATUS,
    ),
]
_ENDED: dict[str, Schema] = {
    "finish_reason": _FINISH,
    "stop_reason": nullable({"type": ["string", "integer"]}),
    "seed": COUNT,
    "usage": ref("Usage"),
}
_HEAD: dict[str, Schema] = {"id": TEXT, "created": COUNT, "model": TEXT, "system_fingerprint": TEXT}
_TOKEN_LOGPROB: dict[str, Schema] = {"token": TEXT, "logprob": NUMBER, "bytes": nullable(listed(COUNT))}
_BYTES = listed({"type": "integer", "minimum": 0, "maximum": 255})
_ERROR = record(message=TEXT, type=TEXT, param=nullable(TEXT), code=nullable(TEXT))
_STAGE = record(
    name=TEXT, value=nullable(NUMBER), num_kept=COUNT, removed=NUMBER, moved=NUMBER, others=NUMBER
)  # fmt: skip
_CANDIDATE = record(
    token_id=COUNT,
    text=TEXT,
    rank=COUNT,
    logits=listed(nullable(NUMBER)),
    probabilities=listed(NUMBER),
    noise=nullable(NUMBER),
    score=nullable(NUMBER),
    dropped_by=nullable(TEXT),
)

ANSWER_SCHEMAS: dict[str, Schema] = {
    "Error": record({"type": constant("error")}, error=_ERROR),  # `type` on Anthropic's routes
    "Health": record({"progress": NUMBER}, status=constant("ok", "loading", "draining", "failed", "hung")),
    "Usage": record(
        prompt_tokens=COUNT,
        completion_tokens=COUNT,
        total_tokens=COUNT,
        prompt_tokens_details=record(cached_tokens=COUNT),
        completion_tokens_details=record(reasoning_tokens=COUNT),
    ),
    "Model": record(id=TEXT, object=constant("model"), created=COUNT, owned_by=TEXT),
    "Chats": record(
        object=constant("list"),
        data=listed({}),
        first_id=nullable(TEXT),
        last_id=nullable(TEXT),
        has_more={"type": "boolean"},
    ),
    "Models": record(object=constant("list"), data=listed(ref("Model"))),
    "ChatCompletion": record(
        **_HEAD,
        object=constant("chat.completion"),
        choices=listed(
            record(
                index=COUNT,
                message=_CHAT_MESSAGE,
                logprobs=nullable(
                    record(content=listed(record(**_TOKEN_LOGPROB, top_logprobs=listed(record(**_TOKEN_LOGPROB)))))
                ),
                finish_reason=_CHAT_FINISH,
            )
        ),
        usage=ref("Usage"),
    ),
    "Completion": record(
        **_HEAD,
        object=constant("text_completion"),
        choices=listed(
            record(
                index=COUNT,
                text=TEXT,
                logprobs=nullable(
                    record(
                        tokens=listed(TEXT),
                        token_logprobs=listed(nullable(NUMBER)),
                        top_logprobs=listed(nullable({"type": "object", "additionalProperties": NUMBER})),
                        text_offset=listed(COUNT),
                    )
                ),
                finish_reason=_FINISH,
            )
        ),
        usage=ref("Usage"),
    ),
    "Response": record(
        id=TEXT,
        object=constant("response"),
        created_at=COUNT,
        model=TEXT,
        status=constant("completed", "incomplete"),
        incomplete_details=nullable(record(reason=constant("max_output_tokens"))),
        error={"type": "null"},
        output=listed({"anyOf": _OUTPUT_ITEMS}),
        store={"const": False},
        usage=record(
            input_tokens=COUNT,
            input_tokens_details=record(cached_tokens=COUNT),
            output_tokens=COUNT,
            output_tokens_details=record(reasoning_tokens=COUNT),
            total_tokens=COUNT,
        ),
    ),
    "Embeddings": record(
        object=constant("list"),
        data=listed(
            record(object=constant("embedding"), index=COUNT, embedding={"anyOf": [listed(NUMBER), TEXT]})
        ),
        model=TEXT,
        usage=record(prompt_tokens=COUNT, total_tokens=COUNT),
    ),
    "AnthropicMessage": record(
        id=TEXT,
        type=constant("message"),
        role=constant("assistant"),
        model=TEXT,
        content=listed(
            {
                "anyOf": [
                    record(type=constant("text"), text=TEXT),
                    record(type=constant("thinking"), thinking=TEXT, signature=TEXT),
                    record(type=constant("tool_use"), id=TEXT, name=TEXT, input={"type": "object"}),
                ]
            }
        ),
        stop_reason=constant("end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"),
        stop_sequence=nullable(TEXT),
        usage=record(input_tokens=COUNT, output_tokens=COUNT, cache_read_input_tokens=COUNT),
    ),
    "Props": record(
        model=TEXT,
        description=TEXT,
        version=TEXT,
        system_fingerprint=TEXT,
        can_chat={"type": "boolean"},
        max_model_len=COUNT,
        vocab_size=COUNT,
        num_layers=COUNT,
        total_slots=COUNT,
        kv_type=TEXT,
        cache_bytes=COUNT,
        default_sampling=record(chat={"type": "object"}, text={"type": "object"}),
    ),
    "InputTokens": record(input_tokens=COUNT),
    "ResponseInputTokens": record(object=constant("response.input_tokens"), input_tokens=COUNT),
    "Tokenized": {
        "anyOf": [
            record({"token_strs": listed(TEXT)}, count=COUNT, max_model_len=COUNT, tokens=listed(COUNT)),
            record(tokens=listed({"anyOf": [COUNT, record(id=COUNT, piece={"anyOf": [TEXT, _BYTES]})]})),
        ]
    },
    "Detokenized": record(content=TEXT, prompt=TEXT),
    "Template": record(prompt=TEXT),
    "Trace": record(
        {"text": TEXT, **_BESIDE_TEXT, "finish_reason": _CHAT_FINISH, "stop_reason": _ENDED["stop_reason"],
         "usage": ref("Usage")},
        object=constant("trace"),
        model=TEXT,
        prompt_token_ids=listed(COUNT),
        prompt_bytes=listed(_BYTES),
        token_ids=listed(COUNT),
        tokens=listed(
            record(
                stages=listed(_STAGE),
                candidates=listed(_CANDIDATE),
                token_id=COUNT,
                bytes=_BYTES,
                position=COUNT,
                step=COUNT,
                seed=nullable(COUNT),
            )
        ),
        seed=COUNT,
    ),
    "Branch": record(
        _BESIDE_TEXT,
        **_HEAD,
        object=constant("branch"),
        text=TEXT,
        token_ids=listed(COUNT),
        token_bytes=listed(_BYTES),
        num_given=COUNT,
        **_ENDED | {"finish_reason": _CHAT_FINISH},
    ),
}  # fmt: skip
