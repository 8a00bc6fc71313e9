"""`/openapi.json` and `/docs`: all routes, described by the Structs of their bodies. Independent of the model."""

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import msgspec
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

import infer
from infer.server.answer_schemas import ANSWER_SCHEMAS, COUNT, NUMBER, TEXT, Schema, listed, ref
from infer.server.answer_types import Json
from infer.server.endpoint import ApiRoute
from infer.server.routes.answer_trace import TraceBody
from infer.server.routes.anthropic_messages import CountTokensBody, MessagesBody
from infer.server.routes.branch import BranchBody
from infer.server.routes.docs_page import PAGE_HEADERS, docs_page
from infer.server.routes.embeddings import EmbeddingsBody
from infer.server.routes.tokens import ApplyTemplateBody, DetokenizeBody, TokenizeBody
from infer.server.schema import ChatBody, CompletionBody, ResponseBody
from infer.server.server_state import ServerState

_STATUSES = {
    400: "The request breaks a rule, which the message names.",
    401: "The key is missing or wrong.",
    404: "There is no such route, or another model is asked for.",
    408: "The body did not come in time.",
    413: "The body is too large.",
    415: "The body is not application/json.",
    429: "More is asked than can be served soon: Retry-After says when to ask again.",
    431: "The headers are too large.",
    500: "The server failed.",
    503: "The model is loading, or the server is shutting down.",
}
_OF_BODIES = (400, 408, 413, 415)


class Operation(NamedTuple):
    """A route's description. `answer` names a schema or is a media type. `parameters` are those of the path and the
    query.
    """

    method: str
    path: str
    summary: str
    answer: str
    body: type[msgspec.Struct] | None = None
    streams: bool = False
    is_open: bool = False
    parameters: Sequence[Schema] = ()


_ID: Schema = {"name": "id", "in": "path", "required": True, "schema": TEXT}
_INTERVAL: Schema = {"name": "interval", "in": "query", "schema": NUMBER | {"minimum": 0.1, "maximum": 10}}
OPERATIONS = (
    Operation("POST", "/v1/chat/completions", "Answer a conversation", "ChatCompletion", ChatBody, streams=True),
    Operation("POST", "/v1/completions", "Go on with texts or ids", "Completion", CompletionBody, streams=True),
    Operation("POST", "/v1/responses", "Answer a conversation, and keep nothing", "Response", ResponseBody,
              streams=True),
    Operation("POST", "/v1/responses/input_tokens", "Count a response's input tokens", "ResponseInputTokens",
              ResponseBody),
    Operation("POST", "/v1/embeddings", "Texts or ids as vectors", "Embeddings", EmbeddingsBody),
    Operation("POST", "/v1/messages", "Answer a conversation, as Anthropic does", "AnthropicMessage", MessagesBody,
              streams=True),
    Operation("POST", "/v1/messages/count_tokens", "Count a conversation's tokens", "InputTokens", CountTokensBody),
    Operation("POST", "/v1/trace", "An answer, and how each of its tokens was sampled", "Trace", TraceBody),
    Operation("POST", "/v1/branch", "Go on from a token of an answer, or with another one", "Branch", BranchBody,
              streams=True),
    Operation("POST", "/tokenize", "A text or a conversation as ids", "Tokenized", TokenizeBody),
    Operation("POST", "/detokenize", "Ids as a text", "Detokenized", DetokenizeBody),
    Operation("POST", "/apply-template", "A conversation as the model's own template renders it", "Template",
              ApplyTemplateBody),
    Operation("GET", "/v1/chat/completions", "The stored chats: none", "Chats"),
    Operation("GET", "/v1/models", "The model that is served", "Models"),
    Operation("GET", "/v1/models/{id}", "The same, by its name", "Model", parameters=[_ID]),
    Operation("GET", "/v1/engine/events", "What the engine does, as events", "text/event-stream",
              parameters=[_INTERVAL]),
    Operation("GET", "/health", "Whether the server lives", "Health", is_open=True),
    Operation("GET", "/ready", "Whether a request would be taken now", "Health", is_open=True),
    Operation("GET", "/metrics", "What was counted, for Prometheus", "text/plain"),
    Operation("GET", "/openapi.json", "This description", "application/json"),
    Operation("GET", "/docs", "It as a page", "text/html"),
    Operation("GET", "/props", "What the model is, and how it is sampled by default", "Props"),
    Operation("GET", "/", "A page to talk with the model and to see how its tokens are chosen", "text/html",
              is_open=True),
    Operation("GET", "/page/{name}", "What the page is made of", "text/javascript", is_open=True,
              parameters=[{"name": "name", "in": "path", "required": True, "schema": TEXT}]),
)  # fmt: skip

_EVENTS: Schema = {
    "description": "Events: the data of each is JSON, or [DONE]."
}  # a string here, objects in OpenAPI 3.2

# Fields that a Struct leaves open, and a handler reads.
_IDS = listed(COUNT) | {"minItems": 1}
_TEXTS = {"anyOf": [TEXT, _IDS, listed(TEXT) | {"minItems": 1}, listed(_IDS) | {"minItems": 1}]}
_REFINED: dict[str, dict[str, Schema]] = {"CompletionBody": {"prompt": _TEXTS}, "EmbeddingsBody": {"input": _TEXTS}}


@cache
def document() -> Json:
    bodies = [each.body for each in OPERATIONS if each.body is not None]
    _, components = msgspec.json.schema_components(bodies, ref_template="#/components/schemas/{name}")
    for body in bodies:
        properties = components[body.__name__]["properties"]
        properties.update(_REFINED.get(body.__name__, {}))
    components["InputMessage"]["required"].remove("type")  # `complete_response`
    paths: dict[str, Json] = {}
    for operation in OPERATIONS:
        paths.setdefault(operation.path, {})[operation.method.lower()] = _operation(operation)
    keys = {"bearer": {"type": "http", "scheme": "bearer"}, "header": _header("x-api-key")}
    return {
        "openapi": "3.1.0",
        "info": {"title": "infer", "version": infer.__version__, "description": "Fields that are null are absent."},
        "servers": [{"url": "/"}],
        "security": [{"bearer": []}, {"header": []}, {}],
        "paths": paths,
        "components": {"schemas": {**components, **ANSWER_SCHEMAS}, "securitySchemes": keys},
    }


async def openapi(request: Request, state: ServerState) -> Response:
    return Response(_encoded(), media_type="application/json")


async def docs(request: Request, state: ServerState) -> Response:
    return HTMLResponse(_page(), headers=PAGE_HEADERS)


def _operation(asked: Operation) -> Json:
    found: Json = {"summary": asked.summary, "operationId": _name(asked), "responses": _responses(asked)}
    if asked.parameters:
        found["parameters"] = list(asked.parameters)
    if asked.body is not None:
        content = {"application/json": {"schema": ref(asked.body.__name__)}}
        found["requestBody"] = {"required": True, "content": content}
    return found | ({"security": []} if asked.is_open else {})


def _responses(asked: Operation) -> Json:
    answer: Json = {"application/json": {"schema": ref(asked.answer)}}
    if "/" in asked.answer:
        answer = {asked.answer: {"schema": {} if asked.answer == "application/json" else TEXT}}
    if asked.streams:
        answer["text/event-stream"] = {"schema": _EVENTS}
    found: Json = {"200": {"description": "The answer.", "content": answer}}
    for status, description in _STATUSES.items():
        if asked.body is not None or asked.parameters or status not in _OF_BODIES:
            schema = ref("Health" if status == 503 and asked.answer == "Health" else "Error")
            found[str(status)] = {"description": description, "content": {"application/json": {"schema": schema}}}
    return found


def _header(name: str) -> Schema:
    return {"type": "apiKey", "in": "header", "name": name}


def _name(asked: Operation) -> str:
    words = asked.path.replace("/", " ").replace("{", " ").replace("}", " ").replace(".", " ").replace("-", " ")
    return "_".join([asked.method.lower(), *words.split()])


@cache
def _encoded() -> bytes:
    return msgspec.json.encode(document())


@cache
def _page() -> str:
    return docs_page(document())


ROUTES = [ApiRoute("GET", "/openapi.json", openapi), ApiRoute("GET", "/docs", docs)]
