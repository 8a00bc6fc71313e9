"""Print the test files that load neither torch nor Numba and start no process: `make quick` runs them.

    python scripts/quick_tests.py            a line per file
    python scripts/quick_tests.py --why test_door   why a file is not among them

All imports of the file count, those at the top of each module that it imports, and fixtures that make a model.
"""

import argparse
import ast
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
FIXTURES = {"folder", "llm", "served", "world"}  # of tests/conftest.py
PROCESSES = {"watched", "subprocess", "pty", "multiprocessing"}  # a test file that starts processes is not pure
HEAVY = {"torch", "numba", "transformers", "xgrammar", "triton", "pyopencl", "gguf", "ray", "scipy"}


def imported_names(body: list[ast.stmt]) -> Iterator[str]:
    """Yield the modules that these statements import, without imports in functions or for type checkers."""
    for statement in body:
        match statement:
            case ast.Import(names):
                yield from (alias.name for alias in names)
            case ast.ImportFrom(module=str(module), names=names, level=0):
                yield module
                yield from (f"{module}.{alias.name}" for alias in names)
            case ast.If(test=ast.Name("TYPE_CHECKING")):
                continue
            case ast.If(body=inner, orelse=other) | ast.Try(body=inner, orelse=other):
                yield from imported_names(inner + other)
            case ast.With(body=inner) | ast.ClassDef(body=inner):
                yield from imported_names(inner)


@cache
def files_by_module() -> dict[str, Path]:
    """Return the files of the package and of the tests' helpers, by the names under which tests import them."""
    found = {path.stem: path for folder in ("tests", "benchmarks") for path in (ROOT / folder).rglob("*.py")}
    for path in (ROOT / "src").rglob("*.py"):
        name = ".".join(path.relative_to(ROOT / "src").with_suffix("").parts)
        found[name.removesuffix(".__init__")] = path
    return found


@cache
def reached(path: Path) -> dict[str, Path]:
    """Return the modules that the file imports at its top. Modules of this repository have their files."""
    return modules_of(imported_names(ast.parse(path.read_text(encoding="utf-8")).body))


def modules_of(names: Iterable[str]) -> dict[str, Path]:
    """Return the heavy modules and the repository's modules among the names, the latter with their files."""
    found = dict[str, Path]()
    for name in names:
        for end in range(1, name.count(".") + 2):  # a package is imported before its module
            part = ".".join(name.split(".")[:end])
            if part in HEAVY or part in files_by_module():
                found[part] = files_by_module().get(part, Path())
    return found


def heavy_path(path: Path, seen: set[Path]) -> list[str] | None:
    """Return the chain of imports from the file to a heavy module, or None if there is none."""
    seen.add(path)
    return _heavy_among(reached(path), seen)


def heavy_path_of_test(path: Path) -> list[str] | None:
    """Return the chain of imports or the fixture that makes a test file heavy, or None."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    arguments = {each.arg for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) for each in node.args.args}
    if fixtures := arguments & FIXTURES:
        return [f"the fixture {min(fixtures)}"]
    inner = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    if processes := PROCESSES & set(imported_names(inner)):
        return [min(processes)]
    return _heavy_among(modules_of(imported_names(inner)), {path})


def _heavy_among(found: dict[str, Path], seen: set[Path]) -> list[str] | None:
    for name, file in found.items():
        if name in HEAVY:
            return [name]
        if file not in seen and (chain := heavy_path(file, seen)) is not None:
            return [name, *chain]
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--why", metavar="TEST", help="print the chain of imports of one file, by its name")
    why = parser.parse_args().why
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        chain = heavy_path_of_test(path)
        if why == path.stem:
            print(" -> ".join(chain or ["nothing heavy"]))
        elif why is None and chain is None and "integration" not in path.parts:
            print(path.relative_to(ROOT))


if __name__ == "__main__":
    main()
