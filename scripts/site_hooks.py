"""Hooks of MkDocs for `make docs`: the page of the API, and links from docs/ to other files of the repository.

The API page is made from the docstrings of the names that `infer` exports. A page may link to a report in
`benchmarks/`, as on GitHub: the site then has a copy of that file under `repository/`.
"""

import ast
import inspect
import os
import re
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent
from typing import Any
from urllib.parse import unquote

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
_LINK = re.compile(r"(!?\[[^\]]*\])\(((?:\.\./)+[^)\s]+)\)")
_SECTION = re.compile(r"^(Args|Returns|Yields|Raises|Example):\n((?:(?: .*)?\n)*)", re.MULTILINE)
_ENTRY = re.compile(r"^(\w+): ", re.MULTILINE)


def on_files(files: Any, config: Any) -> Any:
    """Add the API page and the files outside docs/ that pages link to."""
    from mkdocs.structure.files import File

    files.append(File.generated(config, "api.md", content=api_page()))
    for page in DOCS.rglob("*.md"):
        for _, link in _LINK.findall(page.read_text(encoding="utf-8")):
            target = outside_target(page, link)
            if target is not None and target.is_file():
                path = f"repository/{target.relative_to(ROOT).as_posix()}"
                if files.get_file_from_path(path) is None:
                    files.append(File.generated(config, path, abs_src_path=str(target)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Lead links out of docs/ to the copies in the site. A link to a folder becomes its text."""
    source = DOCS / page.file.src_uri

    def led(found: re.Match[str]) -> str:
        target = outside_target(source, found[2])
        if target is None:
            return found[0]
        if target.is_dir():
            return found[1][1:-1]
        copy = DOCS / "repository" / target.relative_to(ROOT)
        return f"{found[1]}({Path(os.path.relpath(copy, source.parent)).as_posix()})"

    return _LINK.sub(led, markdown)


def outside_target(page: Path, link: str) -> Path | None:
    """Return the file or folder that a page's link leads to, or None if it lies in docs/."""
    target = (page.parent / unquote(link.partition("#")[0])).resolve()
    return None if target.is_relative_to(DOCS) else target


def api_page() -> str:
    """Return the page of all names that `infer` exports, in Markdown."""
    import infer

    parts = ["# API", "The names that `infer` exports. [How to use the library](python.md) shows them by task."]
    objects = {name: getattr(infer, name) for name in infer.__all__}
    for name, value in sorted(objects.items(), key=lambda entry: (not entry[0].endswith("LLM"), entry[0].lower())):
        node = ast.parse(source := dedent(inspect.getsource(value))).body[0]
        parts.append(f"## {name}")
        parts += class_parts(name, node, source) if isinstance(node, ast.ClassDef) else function_parts(node, source)
    return "\n\n".join(parts) + "\n"


def class_parts(name: str, node: ast.ClassDef, source: str) -> Iterator[str]:
    """Yield the fields and the docstring of a class, and its public methods and properties that have a docstring.

    If the docstring describes arguments that are not fields, the signature of `__init__` comes first.
    """
    lines = source.splitlines()
    attributes = [item for item in node.body if isinstance(item, ast.AnnAssign)]
    public = [item for item in attributes if not ast.unparse(item.target).startswith("_")]
    fields = [line for item in public for line in lines[item.lineno - 1 : item.end_lineno]]
    functions = [item for item in node.body if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef)]
    if fields:
        yield _fenced("\n".join(fields))
    elif "Args:\n" in (ast.get_docstring(node) or ""):
        yield from (part for item in functions if item.name == "__init__" for part in function_parts(item, source))
    yield from docstring_parts(node)
    for item in functions:
        if not item.name.startswith("_") and ast.get_docstring(item):
            yield f"### {name}.{item.name}"
            yield from function_parts(item, source)


def function_parts(node: Any, source: str) -> Iterator[str]:
    """Yield the signature of a function as it is written, and its docstring. A property has no signature."""
    decorators = {ast.unparse(each).partition("(")[0] for each in node.decorator_list}
    if not decorators & {"property", "cached_property"}:
        yield _fenced("\n".join(source.splitlines()[node.lineno - 1 : node.body[0].lineno - 1]))
    yield from docstring_parts(node)


def docstring_parts(node: Any) -> Iterator[str]:
    """Yield a Google-style docstring as paragraphs of Markdown."""
    text, end = (ast.get_docstring(node) or "") + "\n", 0
    for found in _SECTION.finditer(text):
        if before := text[end : found.start()].strip():
            yield before
        end, body = found.end(), dedent(found[2]).strip()
        if found[1] == "Example":
            yield _fenced(body)
        elif found[1] in ("Args", "Raises"):
            yield f"**{found[1]}**\n\n" + _ENTRY.sub(r"- `\1`: ", body)
        else:
            yield f"**{found[1]}** {body}"
    if after := text[end:].strip():
        yield after


def _fenced(code: str) -> str:
    return f"```python\n{dedent(code).strip()}\n```"
