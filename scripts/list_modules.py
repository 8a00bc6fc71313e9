"""Write docs/dev/modules.md: each module of src/infer with the first line of its docstring, folder by folder.

    python scripts/list_modules.py            write the page
    python scripts/list_modules.py --check    fail if the page is not up to date

The order is that of the layers in pyproject.toml, from above, then by name. A module's docstring must begin with one
line that says what the module has.
"""

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

from syntax import module_of
from written_page import write_or_check

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "infer"
PAGE = ROOT / "docs" / "dev" / "modules.md"
BEGINNING = """\
# Modules of each package

`scripts/list_modules.py` writes this page from the first line of each module. The packages are in the order of their
layers, from above. [Packages and contracts](packages.md) has the functions between them.
"""


class MissingLineError(Exception):
    """A module whose docstring does not begin with one whole line."""


def first_line(path: Path) -> str:
    """Return the first line of a module's docstring.

    Raises MissingLineError if the module has no docstring, or if its first sentences take more than one line.
    """
    line, _, rest = (ast.get_docstring(module_of(path.read_text(encoding="utf-8"))) or "").partition("\n")
    if not line.endswith(".") or rest.partition("\n")[0]:
        raise MissingLineError(f"{path}: the docstring must begin with one line that ends with a full stop")
    return line


def layers_of(settings: Path) -> list[str]:
    """Return the modules and packages that the contracts of layers name, from above, with dots below `infer`."""
    contracts = tomllib.loads(settings.read_text(encoding="utf-8"))["tool"]["importlinter"]["contracts"]
    layers = []
    for contract in contracts:
        for container in contract["containers"] if contract["type"] == "layers" else []:
            for layer in contract["layers"]:
                siblings = re.findall(r"[\w.]+", layer)  # `a | b`, `a : b`, and `(a)` if it may be missing
                layers += [f"{container}.{name}".partition(".")[2] for name in siblings]
    return layers


def page_of(package: Path, layers: list[str]) -> str:
    """Return the page: a heading, an introduction and a table for each folder of modules."""
    return "\n".join([BEGINNING, *_lines_of(package, package, layers)]).rstrip("\n") + "\n"


def _lines_of(folder: Path, package: Path, layers: list[str]) -> Iterator[str]:
    def order(path: Path) -> tuple[int, str]:
        name = ".".join(path.relative_to(package).with_suffix("").parts)
        places = [place for place, layer in enumerate(layers) if f"{layer}.".startswith(f"{name}.")]
        return min(places, default=len(layers)), path.name

    parts = folder.relative_to(package).parts
    if lost := [path for path in folder.glob("*/*.py") if not (path.parent / "__init__.py").exists()]:
        raise MissingLineError(f"{lost[0]}: its folder has no __init__.py")
    yield f"{'#' * min(len(parts) + 1, 6)} `{'/'.join(parts)}/`\n" if parts else "## `infer`\n"
    yield first_line(folder / "__init__.py") + "\n"
    modules = sorted((path for path in folder.glob("*.py") if path.name != "__init__.py"), key=order)
    if modules:
        yield "| module | content |\n|---|---|"
        yield from (f"| `{path.stem}` | {first_line(path).replace('|', '&#124;')} |" for path in modules)
        yield ""
    for inner in sorted((path.parent for path in folder.glob("*/__init__.py")), key=order):
        yield from _lines_of(inner, package, layers)


def main() -> int:
    try:
        return write_or_check(__doc__, PAGE, page_of(PACKAGE, layers_of(ROOT / "pyproject.toml")))
    except MissingLineError as error:
        print(error)
        return 1


if __name__ == "__main__":
    sys.exit(main())
