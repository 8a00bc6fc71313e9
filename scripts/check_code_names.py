"""Check that the code has every name that docstrings, comments and the pages for contributors give in backticks.

    python scripts/check_code_names.py            fail if a name is wrong
    python scripts/check_code_names.py FILE …     check only these files

A name is one of these:

- a path, also without backticks if it begins with a folder of the repository: `tests/conftest.py`, `requests/stream`;
- a dotted name whose first part is a class, a module or a package of ours: `Loop.submit`, `ops.device`;
- a single word, which any identifier or string of the code may have: `norm_project`, `PagedCache`.

Dotted names of other programs pass, because their first part is not ours. So do the keys and names of files that a
string of the code has, as `config.json`, and the attributes of a variable of the module. The log of docs/dev and
the page of moved modules are not checked: they are history, and name code that is gone.
"""

import argparse
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import NamedTuple

from code_names import FOLDERS, PYTHON_FOLDERS, CodeNames, read_names, variables_of
from syntax import docstrings

ROOT = Path(__file__).parents[1]
PAGES = ("README.md", "CONTRIBUTING.md", "docs/dev/*.md", "docs/explanation/*.md")
HISTORY = ("docs/dev/log.md", "docs/dev/moved.md")
_FENCE = re.compile(r"^( *)```.*?^\1```", re.DOTALL | re.MULTILINE)
_SPAN = re.compile(r"(`+)((?:(?!\n\s*\n)[^`])+)\1")
_REPOSITORY_PATH = re.compile(
    rf"(?<![\w./:~$}}-])(?<!--report )(?:{'|'.join(map(re.escape, FOLDERS))})/(?:[\w./*-]*[\w/*])?(?:::\w+)*"
)
_NAMED_IN_COMMENT = re.compile(rf"#.*(?:`|(?:{'|'.join(map(re.escape, FOLDERS))})/)")
_HOUSE_PATH = re.compile(r"\w+(?:/\w+)*(?:/|/\w+(?:\.\w+)?)")
_FILE = re.compile(r"\w+\.(?:cl|js|md|py|svg|toml)")
_DOTTED = re.compile(r"([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)+)(?:\(.*\))?")
_WORD = re.compile(r"([A-Za-z_]\w*)(?:\(.*\))?")
# A line of a contract: `Class.first(…) / second / third`.
_CONTRACT = re.compile(r"^([A-Z]\w+)\.(\w+)(.*?)(?:  #|$)", re.MULTILINE)


class Fault(NamedTuple):
    """A name that the code does not have. `line` counts from 1."""

    line: int
    name: str
    why: str


def faults_of_span(span: str, names: CodeNames, variables: set[str]) -> Iterator[tuple[str, str]]:
    """Yield the wrong name of a text in backticks, and why it is wrong."""
    span = " ".join(span.split())
    if _HOUSE_PATH.fullmatch(span):
        folder = span.split("/")[0]
        if not names.has_path(span) and (names.is_folder(folder) or folder not in names.words):
            yield span, "no path ends so"
        elif folder in names.former:
            yield span, f"the package {folder} has moved: docs/dev/moved.md"
    elif _FILE.fullmatch(span):
        if not names.has_path(span) and span not in names.dotted:
            yield span, "no file has this name"
    elif found := _DOTTED.fullmatch(span):
        why = dotted_fault(found[1], names, variables)
        if why:
            yield found[1], why
    elif (found := _WORD.fullmatch(span)) and found[1] not in names.words:
        yield found[1], "no code has this name"


def dotted_fault(name: str, names: CodeNames, variables: set[str]) -> str | None:
    """Return why the code does not have a dotted name, or None if it has it or if the name is not ours."""
    first, second, *_ = parts = name.split(".")
    if first in names.members:
        return None if names.has_member(first, second) else f"{first} has no {second}"
    if name in names.dotted:
        return None
    if first in names.former:
        return f"the package {first} has moved: docs/dev/moved.md"
    if not any(True for _ in names.modules_ending_with([first])):
        return None if first in names.words else f"no code has {first}"
    if any(_module_has(parts, split, names) for split in range(len(parts), 0, -1)):
        return None
    if first in variables and any(second in members for members in names.members.values()):
        return None
    return f"no module {first} has this"


def _module_has(parts: list[str], split: int, names: CodeNames) -> bool:
    """Return True if a module that ends with the parts before `split` defines the part after them."""
    rest = parts[split:]
    for module in names.modules_ending_with(parts[:split]):
        if not rest:
            return True
        if rest[0] in names.modules[module]:
            return len(rest) == 1 or rest[0] not in names.members or names.has_member(rest[0], rest[1])
    return False


def path_fault(path: str, names: CodeNames) -> str | None:
    """Return why a path from the root of the repository is wrong, or None. Names of tests may follow, as in pytest."""
    file, *tests = path.rstrip("/").split("::")
    matching = file in names.paths or any(fnmatch(each, file) for each in names.paths)
    if not matching:
        return "no such file or folder"
    missing = [test for test in tests if test not in names.words]
    return f"it has no {missing[0]}" if missing else None


def faults_of_text(text: str, names: CodeNames, variables: set[str]) -> Iterator[Fault]:
    """Yield the wrong names of a docstring, a comment, or the prose of a page."""
    for found in _REPOSITORY_PATH.finditer(text):
        why = path_fault(found[0], names)
        if why:
            yield Fault(_line_of(text, found), found[0], why)
    for found in _SPAN.finditer(text):
        if not _REPOSITORY_PATH.match(found[2]):
            for name, why in faults_of_span(found[2], names, variables):
                yield Fault(_line_of(text, found), name, why)


def _line_of(text: str, found: re.Match[str]) -> int:
    return text.count("\n", 0, found.start()) + 1


def faults_of_page(text: str, names: CodeNames) -> Iterator[Fault]:
    """Yield the wrong names of a page: of its prose, and of the contracts that its blocks of code list."""
    yield from faults_of_text(_FENCE.sub(lambda found: "\n" * found[0].count("\n"), text), names, names.variables)
    for fence in _FENCE.finditer(text):
        for found in _CONTRACT.finditer(fence[0]):
            cls, first, others = found.groups()
            members = [first, *re.findall(r" / (\w+)", others)]
            missing = [f"{cls}.{member}" for member in members if not names.has_member(cls, member)]
            if cls in names.members and missing:
                yield Fault(_line_of(text, fence) + _line_of(fence[0], found) - 1, missing[0], "no class has this")


def faults_of_module(text: str, names: CodeNames) -> Iterator[Fault]:
    """Yield the wrong names of a module's docstrings and comments."""
    variables = variables_of(text)
    texts = [(node.lineno, str(node.value)) for node in docstrings(text)]
    for line, found in [*texts, *_comments(text)]:
        for fault in faults_of_text(found, names, variables):
            yield fault._replace(line=line + fault.line - 1)


def _comments(text: str) -> list[tuple[int, str]]:
    """Return the comments of a module with their first lines. Comments on adjacent lines are one text."""
    found: list[tuple[int, str]] = []
    if not _NAMED_IN_COMMENT.search(text):
        return found
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            line, before = found[-1] if found else (0, "")
            if found and line + before.count("\n") + 1 == token.start[0]:
                found[-1] = line, f"{before}\n{token.string}"
            else:
                found.append((token.start[0], token.string))
    return found


def files(root: Path) -> Iterator[Path]:
    """Yield the files that are checked."""
    pages = [page for pattern in PAGES for page in sorted(root.glob(pattern))]
    yield from (page for page in pages if page.relative_to(root).as_posix() not in HISTORY)
    for folder in PYTHON_FOLDERS:
        yield from sorted((root / folder).rglob("*.py"))


def faults_of(path: Path, names: CodeNames) -> list[Fault]:
    """Return the wrong names of a file."""
    text = path.read_text(encoding="utf-8")
    return list((faults_of_module if path.suffix == ".py" else faults_of_page)(text, names))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", type=Path)
    names = read_names(ROOT)
    wrong = 0
    for path in parser.parse_args().files or files(ROOT):
        for line, name, why in faults_of(path, names):
            print(f"{path.resolve().relative_to(ROOT)}:{line}: `{name}`: {why}")
            wrong += 1
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
