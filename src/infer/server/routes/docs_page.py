"""The page `/docs`: an OpenAPI document as HTML. It needs no script and nothing from another host."""

import base64
import hashlib
import json
from collections.abc import Iterator
from html import escape
from typing import Any

from infer.server.answer_types import Json

_STYLE = """
:root{color-scheme:light dark;--line:#8884;--soft:#8882}
body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}
h1{font-size:1.6rem}h2{font-size:1.15rem;margin-top:2.5rem}
code,summary b{font-family:ui-monospace,monospace;font-size:.92em}
details{border:1px solid var(--line);border-radius:.4rem;margin:.4rem 0;padding:.4rem .8rem}
summary{cursor:pointer}summary span{opacity:.75}
table{border-collapse:collapse;width:100%;margin:.6rem 0;display:block;overflow-x:auto}
td,th{border-top:1px solid var(--line);padding:.25rem .6rem .25rem 0;text-align:left;vertical-align:top}
th{font-weight:600;white-space:nowrap}a{color:inherit}:target{background:var(--soft)}
"""
_STYLE_HASH = base64.b64encode(hashlib.sha256(_STYLE.encode()).digest()).decode()
PAGE_HEADERS = {
    "Content-Security-Policy": f"default-src 'none'; style-src 'sha256-{_STYLE_HASH}'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}
_BOUNDS = {
    "minimum": "≥", "maximum": "≤", "exclusiveMinimum": ">", "exclusiveMaximum": "<",
    "minItems": "length ≥", "maxItems": "length ≤", "minLength": "length ≥", "maxLength": "length ≤", "pattern": "like",
}  # fmt: skip


def docs_page(document: Json) -> str:
    info, schemas = document["info"], document["components"]["schemas"]
    operations = (
        _operation(method, path, operation)
        for path, by_method in document["paths"].items()
        for method, operation in by_method.items()
    )
    records = (_record(name, schema) for name, schema in schemas.items())
    title = f"{escape(info['title'])} {escape(info['version'])}"
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title>'
        f'<meta name="viewport" content="width=device-width"><style>{_STYLE}</style>'
        f'<h1>{title}</h1><p>{escape(info["description"])} The same as <a href="openapi.json">openapi.json</a>.</p>'
        f"<h2>Routes</h2>{''.join(operations)}<h2>Objects</h2>{''.join(records)}</html>"
    )


def _operation(method: str, path: str, operation: Json) -> str:
    rows = [("parameter " + each["name"], _type(each["schema"])) for each in operation.get("parameters", ())]
    if "requestBody" in operation:
        rows.append(("body", _type(operation["requestBody"]["content"]["application/json"]["schema"])))
    for status, response in operation["responses"].items():
        types = " or ".join(
            f"{_type(each['schema'])} <code>{kind}</code>" for kind, each in response["content"].items()
        )
        rows.append((status, f"{escape(response['description'])} {types}"))
    head = f"<b>{method.upper()} {escape(path)}</b> <span>{escape(operation['summary'])}</span>"
    table = "".join(f"<tr><th>{escape(name)}<td>{text}" for name, text in rows)
    return f"<details><summary>{head}</summary><table>{table}</table></details>"


def _record(name: str, schema: Json) -> str:
    required = schema.get("required", ())
    rows = "".join(
        f"<tr><th><code>{escape(field)}</code><td>{'required' if field in required else ''}<td>{_type(each)}"
        f"<td>{escape(each.get('description', ''))}"
        for field, each in schema.get("properties", {}).items()
    )
    text = escape(schema.get("description", ""))
    shown = f"<p>{text}</p><table>{rows}</table>" if rows else f"<p>{text} {_type(schema)}</p>"
    return f'<details id="{escape(name)}" open><summary><b>{escape(name)}</b></summary>{shown}</details>'


def _type(schema: Json) -> str:
    """Return the allowed values of a schema, in a few words of HTML."""
    return " or ".join(_alternatives(schema)) or "anything"


def _alternatives(schema: Json) -> Iterator[str]:
    if "$ref" in schema:
        name = escape(schema["$ref"].rsplit("/", 1)[-1])
        yield f'<a href="#{name}">{name}</a>'
    elif "anyOf" in schema:
        for each in schema["anyOf"]:
            yield from _alternatives(each)
    elif "enum" in schema:
        yield ", ".join(f"<code>{escape(json.dumps(value))}</code>" for value in schema["enum"])
    elif schema.get("type") == "array":
        yield f"list of ({_type(schema.get('items', {}))}){_bounds(schema)}"
    elif "type" in schema:
        names: Any = schema["type"]
        yield escape(" or ".join([names] if isinstance(names, str) else names)) + _bounds(schema)


def _bounds(schema: Json) -> str:
    found = [f"{sign} {schema[name]}" for name, sign in _BOUNDS.items() if name in schema]
    return f" {escape(', '.join(found))}" if found else ""
