"""Serve the page at `/`: unchanged files of this package. They need no key and ask no other host."""

import hashlib
from functools import cache
from pathlib import Path
from typing import NamedTuple

from starlette.requests import Request
from starlette.responses import Response

from infer.server.endpoint import ApiRoute
from infer.server.errors import ApiError
from infer.server.server_state import ServerState

_FOLDER = Path(__file__).parents[2] / "web_ui"
_MEDIA_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
_HEADERS = {
    "Cache-Control": "no-cache",  # revalidated each time, answered with 304
    "Content-Security-Policy": "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


class PageFile(NamedTuple):
    content: bytes
    media_type: str
    etag: str


@cache
def page_files() -> dict[str, PageFile]:
    """Return the files of the page by name."""
    return {path.name: _read(path) for path in sorted(_FOLDER.iterdir()) if path.suffix in _MEDIA_TYPES}


def _read(path: Path) -> PageFile:
    content = path.read_bytes()
    return PageFile(content, _MEDIA_TYPES[path.suffix], f'"{hashlib.sha256(content).hexdigest()[:24]}"')


async def page(request: Request, state: ServerState) -> Response:
    name = request.path_params.get("name", "index.html")
    if (found := page_files().get(name)) is None:
        raise ApiError(404, f"there is no GET {request.url.path:.80} here", code="unknown_url")
    headers = _HEADERS | {"ETag": found.etag}
    if found.etag in request.headers.get("if-none-match", ""):
        return Response(status_code=304, headers=headers)
    return Response(found.content, media_type=found.media_type, headers=headers)


ROUTES = [
    ApiRoute("GET", "/", page, is_open=True),
    ApiRoute("GET", "/page/{name}", page, is_open=True),
]
