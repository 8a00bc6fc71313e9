"""The files of the page, ready to be sent by the server."""

import hashlib
from pathlib import Path
from typing import NamedTuple

FOLDER = Path(__file__).parent
_MEDIA_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml",
                ".json": "application/json"}  # fmt: skip


class PageFile(NamedTuple):
    content: bytes
    media_type: str
    etag: str


def page_files(parameters: bytes) -> dict[str, PageFile]:
    """Return the files of the page by name. `parameters` is the content of `parameters.json`."""
    found = {path.name: path.read_bytes() for path in sorted(FOLDER.iterdir()) if path.suffix in _MEDIA_TYPES}
    return {name: _file(name, content) for name, content in {**found, "parameters.json": parameters}.items()}


def _file(name: str, content: bytes) -> PageFile:
    return PageFile(content, _MEDIA_TYPES[Path(name).suffix], f'"{hashlib.sha256(content).hexdigest()[:24]}"')
