"""`/openapi.json` and `/docs`: all routes, described by the Structs of their bodies and answers.

The page needs no script and nothing from another host.
"""

import base64
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from functools import cache
from html import escape
from typing import Any

import msgspec
from starlette.responses import HTMLResponse, Response

import infer
from infer.serving.protocols.api_errors import ErrorOutput
from infer.serving.protocols.events import EVENTS, LINES, Json
from infer.serving.server.endpoint import JSON, ApiRequest, ApiRoute, get
from infer.serving.server.routes.status import Health

_STATUSES = {
    400: "The request breaks a rule, which the message names.",
    401: "The key is missing or wrong.",
    404: "The route does not exist, or another model is requested.",
    408: "The body did not arrive in time.",
    413: "The body is too large.",
    415: "The body is not application/json, and was sent by a page or a program other than curl.",
    429: "The server is busy: retry after the time in Retry-After.",
    431: "The headers are too large.",
    500: "The server failed.",
    501: "The body has a Transfer-Encoding other than chunked.",
    503: "The model is loading, or the server is shutting down.",
}
_OF_BODIES = (400, 408, 413, 415, 501)
_TEXT: Json = {"type": "string"}
_STREAMS: dict[str, Json] = {  # a string here, objects in OpenAPI 3.2
    EVENTS: {"description": "Events: the data of each is JSON, or [DONE]."},
    LINES: {"description": "Lines: each is a JSON object."},
}

# Fields whose type a Struct leaves open, and a handler checks.
_IDS: Json = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
_LISTS = [{"type": "array", "items": each, "minItems": 1} for each in (_TEXT, _IDS)]
_TEXTS: Json = {"anyOf": [_TEXT, _IDS, *_LISTS]}
_REFINED: dict[str, dict[str, Json]] = {"CompletionBody": {"prompt": _TEXTS}, "EmbeddingsBody": {"input": _TEXTS}}
# Structs of which a body may leave out `type`: it is added when the body is read.
_UNTYPED = ("InputMessage", "InputText", "TextPart")
# Tools with another type than these are left out, with a warning.
_TOOL_TYPES = {"FunctionTool": "function", "ResponseTool": "function", "MessagesTool": "custom"}
_STYLE = """
:root{color-scheme:light dark}
body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}
details{border:1px solid #8884;border-radius:.4rem;margin:.4rem 0;padding:.4rem .8rem}
summary{cursor:pointer}pre{overflow-x:auto}a{color:inherit}
"""
_STYLE_HASH = base64.b64encode(hashlib.sha256(_STYLE.encode()).digest()).decode()
PAGE_HEADERS = {
    "Content-Security-Policy": f"default-src 'none'; style-src 'sha256-{_STYLE_HASH}'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}
_REFERENCE, _LINK = re.compile(r"#/components/schemas/(\w+)"), r'<a href="#\1">\1</a>'


def description_routes(table: Sequence[ApiRoute]) -> list[ApiRoute]:
    """Return the routes that describe all routes: those of `table`, and themselves."""

    @cache
    def made() -> Json:
        return document([*table, *own])

    async def openapi(request: ApiRequest) -> Json:
        return made()

    async def docs(request: ApiRequest) -> Response:
        return HTMLResponse(docs_page(made()), headers=PAGE_HEADERS)

    own = [
        get("/openapi.json", openapi, "Describe all routes in OpenAPI's notation"),
        get("/docs", docs, "Describe all routes as a page", answer="text/html"),
    ]
    return own


def document(table: Sequence[ApiRoute]) -> Json:
    """Return the description of the routes. It does not depend on the model."""
    types = [kind for each in table for kind in (each.body, each.answer) if not isinstance(kind, str | None)]
    schemas, components = msgspec.json.schema_components(
        [*types, ErrorOutput], ref_template="#/components/schemas/{name}"
    )
    schema_by_type = dict(zip([*types, ErrorOutput], schemas, strict=True))
    for name, fields in _REFINED.items():
        components[name]["properties"].update(fields)
    for name in _UNTYPED:
        components[name]["required"].remove("type")
    for name, kind in _TOOL_TYPES.items():
        other = {
            "type": "object",
            "properties": {"type": {"type": "string", "not": {"const": kind}}},
            "required": ["type"],
        }
        components[name] = {"title": name, "anyOf": [components[name], other]}
    paths: Json = {}
    for route in table:
        path = route.path.replace(":path}", "}")
        paths.setdefault(path, {})[route.method.lower()] = _operation(route, path, schema_by_type)
    keys = {
        "bearer": {"type": "http", "scheme": "bearer"},
        "header": {"type": "apiKey", "in": "header", "name": "x-api-key"},
    }
    return {
        "openapi": "3.1.0",
        "info": {"title": "infer", "version": infer.__version__, "description": "Fields that are null are absent."},
        "servers": [{"url": "/"}],
        "security": [{"bearer": []}, {"header": []}, {}],
        "paths": paths,
        "components": {"schemas": components, "securitySchemes": keys},
    }


def _operation(route: ApiRoute, path: str, schema_by_type: Mapping[Any, Json]) -> Json:
    words = re.findall(r"\w+", path)
    found: Json = {
        "summary": route.summary,
        "operationId": "_".join([route.method.lower(), *words]),
        "responses": _responses(route, schema_by_type),
    }
    in_path: Json = {"in": "path", "required": True, "schema": _TEXT}
    if parameters := [*(in_path | {"name": name} for name in re.findall(r"{(\w+)}", path)), *route.parameters]:
        found["parameters"] = parameters
    if route.body is not None:
        found["requestBody"] = {"required": True, "content": _json_of(schema_by_type[route.body])}
    return found | ({"security": []} if route.is_open else {})


def _responses(route: ApiRoute, schema_by_type: Mapping[Any, Json]) -> Json:
    if isinstance(route.answer, str):
        answer: Json = {route.answer: {"schema": {} if route.answer == JSON else _TEXT}}
    else:
        answer = _json_of(schema_by_type[route.answer])
    if route.streams:
        answer[route.shape.media_type] = {"schema": _STREAMS[route.shape.media_type]}
    found: Json = {"200": {"description": "The answer.", "content": answer}}
    for status, description in _STATUSES.items():
        if (
            route.body is not None
            or status not in _OF_BODIES
            or (status == 400 and (route.parameters or route.method != "GET"))
        ):
            kind = Health if status == 503 and route.answer is Health else ErrorOutput
            found[str(status)] = {"description": description, "content": _json_of(schema_by_type[kind])}
    return found


def _json_of(schema: Json) -> Json:
    return {JSON: {"schema": schema}}


def docs_page(document: Json) -> str:
    """Return the page: one box per route, and one per object, to which the routes link."""
    info, schemas = document["info"], document["components"]["schemas"]
    routes = (
        f"<details><summary><b>{method.upper()} {escape(path)}</b> {escape(operation['summary'])}</summary>"
        f"{_shown(operation)}</details>"
        for path, by_method in document["paths"].items()
        for method, operation in by_method.items()
    )
    objects = (
        f'<details id="{name}"><summary><b>{name}</b></summary>{_shown(schema)}</details>'
        for name, schema in schemas.items()
    )
    title = f"{escape(info['title'])} {escape(info['version'])}"
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title>'
        f'<meta name="viewport" content="width=device-width"><style>{_STYLE}</style>'
        f'<h1>{title}</h1><p>{escape(info["description"])} The same as <a href="openapi.json">openapi.json</a>.</p>'
        f"<h2>Routes</h2>{''.join(routes)}<h2>Objects</h2>{''.join(objects)}</html>"
    )


def _shown(described: Json) -> str:
    text = escape(json.dumps(described, indent=1, ensure_ascii=False), quote=False)
    return f"<pre>{_REFERENCE.sub(_LINK, text)}</pre>"
