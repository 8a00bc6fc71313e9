"""Hooks of MkDocs for `make docs`: links from docs/ to other files of the repository, and diagrams.

A page may link to a report in `benchmarks/`, as on GitHub: the site then has a copy of that file under `repository/`.
A diagram of `docs/diagrams/` becomes part of the page, so that its colours follow the theme.
"""

import os
import re
from pathlib import Path
from typing import Any
from urllib.parse import unquote

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
_LINK = re.compile(r"(!?\[[^\]]*\])\(((?:\.\./)+[^)\s]+)\)")
_DIAGRAM = re.compile(r"^!\[([^\]]*)\]\(([^)\s]*diagrams/[^)\s]+\.svg)\)$", re.MULTILINE)


def on_files(files: Any, config: Any) -> Any:
    """Add the files outside docs/ that pages link to."""
    from mkdocs.structure.files import File

    for page in DOCS.rglob("*.md"):
        for _, link in _LINK.findall(page.read_text(encoding="utf-8")):
            target = outside_target(page, link)
            if target is not None and target.is_file():
                path = f"repository/{target.relative_to(ROOT).as_posix()}"
                if files.get_file_from_path(path) is None:
                    files.append(File.generated(config, path, abs_src_path=str(target)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Replace diagrams by their SVG, and lead links out of docs/ to the copies in the site.

    A link to a folder becomes its text.
    """
    source = DOCS / page.file.src_uri

    def drawn(found: re.Match[str]) -> str:
        svg = (source.parent / found[2]).read_text(encoding="utf-8")
        return f'<figure role="img" aria-label="{found[1]}" style="width: 100%">\n{svg.strip()}\n</figure>'

    def led(found: re.Match[str]) -> str:
        target = outside_target(source, found[2])
        if target is None:
            return found[0]
        if target.is_dir():
            return found[1][1:-1]
        copy = DOCS / "repository" / target.relative_to(ROOT)
        return f"{found[1]}({Path(os.path.relpath(copy, source.parent)).as_posix()})"

    # mkdocstrings takes `[…][:…]`, as in a model's name, for a reference to another object.
    return _LINK.sub(led, _DIAGRAM.sub(drawn, markdown)).replace("][:", "]\\[:")


def outside_target(page: Path, link: str) -> Path | None:
    """Return the file or folder that a page's link leads to, or None if it is in docs/."""
    target = (page.parent / unquote(link.partition("#")[0])).resolve()
    return None if target.is_relative_to(DOCS) else target
