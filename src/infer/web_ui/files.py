"""The files of the page, as the server sends them."""

import hashlib
from functools import cache
from pathlib import Path
from typing import NamedTuple

FOLDER = Path(__file__).parent
_MEDIA_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}


class PageFile(NamedTuple):
    content: bytes
    media_type: str
    etag: str


@cache
def page_files() -> dict[str, PageFile]:
    """Return the files of the page by name."""
    return {path.name: _read(path) for path in sorted(FOLDER.iterdir()) if path.suffix in _MEDIA_TYPES}


def _read(path: Path) -> PageFile:
    content = path.read_bytes()
    return PageFile(content, _MEDIA_TYPES[path.suffix], f'"{hashlib.sha256(content).hexdigest()[:24]}"')
