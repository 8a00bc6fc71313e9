"""Serve the page at `/`: the files of `web_ui`, and the declared parameters. No key is needed, and no other host."""

from functools import cache

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from infer.serving.server.endpoint import get
from infer.serving.server.http_errors import ApiError
from infer.serving.server.routes.page_parameters import page_parameters
from infer.serving.server.server_state import ServerState
from infer.serving.web_ui.files import PageFile, page_files

_HEADERS = {
    "Cache-Control": "no-cache",  # revalidated each time, answered with 304
    "Content-Security-Policy": "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


@cache
def served_files() -> dict[str, PageFile]:
    return page_files(parameters=msgspec.json.encode(page_parameters()))


async def page(request: Request, state: ServerState) -> Response:
    name = request.path_params.get("name", "index.html")
    if (found := served_files().get(name)) is None:
        raise ApiError(404, f"there is no GET {request.url.path:.80} here", code="unknown_url")
    headers = _HEADERS | {"ETag": found.etag}
    if found.etag in request.headers.get("if-none-match", ""):
        return Response(status_code=304, headers=headers)
    return Response(found.content, media_type=found.media_type, headers=headers)


ROUTES = [
    get("/", page, "Show a page to talk with the model", answer="text/html", is_open=True),
    get("/page/{name}", page, "Serve the files of the page", answer="text/javascript", is_open=True),
]
