"""Print the test files beside changed files, a line each: `make near` runs them.

    python scripts/near_tests.py            beside what is not committed
    python scripts/near_tests.py main       beside what differs from a commit

Beside a module are the test files that import it, that are named after it, or that must see a fault planted in it;
without any, all of its folder. Beside another file are those that import it, also through helpers, or that name it.
"""

import argparse
import ast
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from plant_faults import ROOT, read_faults
from syntax import nodes_of_types

faults = cache(read_faults)


def changed_files(commit: str) -> list[str]:
    """Return the paths of files that differ from a commit, or that git does not know, without removed ones."""
    commands = (["diff", "--name-only", commit], ["ls-files", "--others", "--exclude-standard"])
    listed = [subprocess.check_output(["git", *command], cwd=ROOT, text=True).split("\n") for command in commands]
    return [name for names in listed for name in names if (ROOT / name).is_file()]


def near(name: str) -> set[str]:
    """Return the test files beside a file of the repository. Both are paths from its root."""
    path = Path(name)
    if path.name.startswith("test_"):
        return {name}
    if path.suffix != ".py" and not path.is_relative_to("src"):
        return {test for test in tests() if path.name in text_of(test)}
    if not path.is_relative_to("src"):
        return {test for test in tests() if path.stem in reached(test)}
    inner = path.relative_to("src", "infer")
    folders = ({test for test in tests() if Path(test).is_relative_to(each)} for each in Path("tests", inner).parents)
    beside = next(filter(None, folders))
    named = {test for test in beside if Path(test).stem.startswith(f"test_{path.stem}")}
    module = ".".join(("infer", *inner.with_suffix("").parts)).removesuffix(".__init__")
    importing = {test for test in tests() if module in reached(test)}
    named_by_faults = (test for fault in faults() if fault.file == str(inner) for test in fault.tests)
    seeing = {f"tests/{test.partition('::')[0]}" for test in named_by_faults}
    return named | importing | seeing or beside


@cache
def text_of(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


@cache
def tests() -> list[str]:
    return sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "tests").rglob("test_*.py"))


@cache
def reached(test: str) -> frozenset[str]:
    """Return the modules that a test file imports, with those that its helpers import."""
    found = set(imported_names(text_of(test)))
    for helper in [f"tests/helpers/{name}.py" for name in found]:
        if (ROOT / helper).is_file():
            found |= reached(helper)
    return frozenset(found)


def imported_names(text: str) -> Iterator[str]:
    """Yield the modules that a file imports anywhere, and `module.name` for each name that it takes from one."""
    for node in nodes_of_types(text, ast.Import, ast.ImportFrom):
        match node:
            case ast.Import(names):
                yield from (alias.name for alias in names)
            case ast.ImportFrom(module=str(module), names=names):
                yield module
                yield from (f"{module}.{alias.name}" for alias in names)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commit", nargs="?", default="HEAD", help="default: the last one, so what is not committed")
    found = {test for name in changed_files(parser.parse_args().commit) for test in near(name)}
    print("\n".join(sorted(found)))


if __name__ == "__main__":
    main()
