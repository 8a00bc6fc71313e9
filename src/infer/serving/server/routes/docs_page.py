"""The page `/docs`: an OpenAPI document as HTML. It needs no script and nothing from another host."""

import base64
import hashlib
import json
import re
from html import escape

from infer.serving.server.answer_types import Json

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
