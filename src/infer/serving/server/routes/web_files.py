"""Serve the page at `/`: the files of `web_ui`, and the declared parameters, from which the page builds its controls.

No key is needed, and no other host.
"""

import hashlib
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from starlette.responses import Response

from infer.request_limits import NUM_TOKENS_OF_CALLS
from infer.sampling_params import PARAMETERS, SamplingParams
from infer.serving.protocols.api_errors import ApiError
from infer.serving.server.endpoint import ApiRequest, get
from infer.serving.server.routes.answer_trace import OneChoiceBody

_HEADERS = {
    "Cache-Control": "no-cache",  # revalidated each time, answered with 304
    "Content-Security-Policy": "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
_NOT_SHARED = frozenset({"model", "user", "stream", "stream_options", "n", "prompt_logprobs", "return_token_ids"})
FOLDER = Path(__file__).parents[2] / "web_ui"
_MEDIA_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml",
                ".json": "application/json"}  # fmt: skip


class PageFile(NamedTuple):
    content: bytes
    media_type: str
    etag: str


@cache
def served_files() -> dict[str, PageFile]:
    """Return the files of the page by name, and the parameters as `parameters.json`."""
    contents = {path.name: path.read_bytes() for path in sorted(FOLDER.iterdir()) if path.suffix in _MEDIA_TYPES}
    contents["parameters.json"] = msgspec.json.encode(page_parameters())
    return {
        name: PageFile(content, _MEDIA_TYPES[Path(name).suffix], f'"{hashlib.sha256(content).hexdigest()[:24]}"')
        for name, content in contents.items()
    }


async def page(request: ApiRequest) -> Response:
    name = request.path_params.get("name", "index.html")
    if (found := served_files().get(name)) is None:
        raise ApiError(404, f"there is no GET {request.url.path:.80} here", code="unknown_url")
    headers = _HEADERS | {"ETag": found.etag}
    if found.etag in request.headers.get("if-none-match", ""):
        return Response(status_code=304, headers=headers)
    return Response(found.content, media_type=found.media_type, headers=headers)


def page_parameters() -> dict[str, Any]:
    """Return the sliders, the headings of a trace's stages, and the fields that `/v1/trace` and `/v1/branch` have."""
    return {
        "numbers": [_slider(name) for name, declared in PARAMETERS.items() if declared.slider is not None],
        "headings": {name: declared.stage for name, declared in PARAMETERS.items() if declared.stage},
        "shared": [name for name in OneChoiceBody.__struct_fields__ if name not in _NOT_SHARED],
    }


def _slider(name: str) -> dict[str, Any]:
    declared, standard = PARAMETERS[name], getattr(SamplingParams(max_new_tokens=NUM_TOKENS_OF_CALLS), name)
    assert declared.slider is not None
    least, most, step = declared.slider
    label = declared.stage if "-" in declared.stage else (declared.body_name or name).replace("_", " ")
    return {
        "name": declared.body_name or name,
        "label": label.capitalize(),
        "hint": declared.help,
        "min": least,
        "max": most,
        "step": step,
        "off": declared.none[0] if standard is None else standard,
    }


ROUTES = [
    get("/", page, "Show a page to talk with the model", answer="text/html", is_open=True),
    get("/page/{name}", page, "Serve the files of the page", answer="text/javascript", is_open=True),
]
