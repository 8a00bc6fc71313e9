"""The names that the repository's code defines, read from its syntax trees: modules, classes, functions and files."""

import ast
import builtins
import keyword
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from syntax import DEFINITIONS, docstrings, module_of, nodes_below, nodes_of_types

PYTHON_FOLDERS = ("src", "tests", "scripts", "benchmarks", "examples")
FOLDERS = (*PYTHON_FOLDERS, ".ci", ".github", "deploy", "docs")
# The words of these files count as names of code, although only Python is parsed.
_OTHER_CODE = {".cl", ".css", ".h", ".html", ".js", ".sh", ".toml", ".yaml", ".yml", ""}
_WORD = re.compile(r"\w+")
_DOTTED = re.compile(r"\w+(?:\.\w+)+")
_NAMED = (ast.Name, ast.Attribute, ast.Constant, ast.arg, ast.keyword, ast.alias, ast.ImportFrom, *DEFINITIONS)


@dataclass
class CodeNames:
    """All names of the code. `dotted` has the texts with a dot that strings of the code contain, such as file names."""

    paths: set[str] = field(default_factory=set)
    modules: dict[str, set[str]] = field(default_factory=dict)
    modules_by_end: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    members: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    bases: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    variables: set[str] = field(default_factory=set)
    words: set[str] = field(default_factory=lambda: {*keyword.kwlist, *dir(builtins)})
    dotted: set[str] = field(default_factory=set)
    former: set[str] = field(default_factory=set)  # packages of docs/dev/moved.md whose names no folder has now

    def modules_ending_with(self, parts: Sequence[str]) -> Iterator[str]:
        """Yield the modules whose last names are `parts`: `requests.loop` is found as `infer.engine.requests.loop`."""
        ending = "." + ".".join(parts)
        yield from (name for name in self.modules_by_end[parts[-1]] if f".{name}".endswith(ending))

    def has_member(self, cls: str, name: str) -> bool:
        """Return True if a class of this name, or one of its bases, has the member."""
        seen, waiting = set(), [cls]
        while waiting:
            cls = waiting.pop()
            if name in self.members.get(cls, ()) or hasattr(getattr(builtins, cls, None), name):
                return True
            seen.add(cls)
            waiting += self.bases.get(cls, set()) - seen
        return False

    def is_folder(self, name: str) -> bool:
        """Return True if a folder of Python modules has this name."""
        return any(f".{name}." in f".{module}" for module in self.modules)

    def has_path(self, path: str) -> bool:
        """Return True if a file or folder has this path, or a path that ends so. A module may lack its suffix."""
        ending = "/" + path.rstrip("/")
        return any(f"/{each}".endswith((ending, f"{ending}.py")) for each in self.paths)


def read_names(root: Path) -> CodeNames:
    """Read the names of all code below `root`."""
    names = CodeNames()
    top = [path for path in root.iterdir() if path.is_file() or path.name in FOLDERS]
    for path in [*top, *(path for folder in FOLDERS for path in sorted((root / folder).rglob("*")))]:
        if "__pycache__" in path.parts:
            continue
        names.paths.add(path.relative_to(root).as_posix())
        names.words.update(path.name.split("."))
        if path.suffix == ".py" and path.relative_to(root).parts[0] in PYTHON_FOLDERS:
            _add_module(names, path.relative_to(root), path.read_text(encoding="utf-8"))
        elif path.suffix in _OTHER_CODE and path.is_file() and "data" not in path.parts:
            names.words.update(_WORD.findall(path.read_text(encoding="utf-8")))
    moved = root / "docs" / "dev" / "moved.md"
    if moved.exists():
        former = re.findall(r"^\| `(\w+)/`", moved.read_text(encoding="utf-8"), re.MULTILINE)
        names.former = {name for name in former if not names.is_folder(name)}
    return names


def module_name(path: Path) -> str:
    """Return the dotted name of a module from its path: `src/infer/engine/__init__.py` is `infer.engine`."""
    parts = path.with_suffix("").parts
    return ".".join(part for part in parts[parts[0] == "src" :] if part != "__init__")


def _add_module(names: CodeNames, path: Path, text: str) -> None:
    name = module_name(path)
    defined = names.modules[name] = set(_bound_names(module_of(text).body))
    names.modules_by_end[name.rpartition(".")[2]].append(name)
    documented = {id(node) for node in docstrings(text)}
    for node in nodes_of_types(text, *_NAMED):
        if isinstance(node, ast.ClassDef):
            _add_class(names, node)
        match node:
            case ast.Constant(value=str(said)) if id(node) not in documented:
                names.dotted.update(_DOTTED.findall(said))
                code = (word for word in _WORD.findall(said) if word == said or not word.islower() or "_" in word)
                names.words.update(code)
            case ast.arg(arg=name) | ast.Attribute(attr=name) | ast.Name(id=name) | ast.keyword(arg=str(name)):
                names.words.add(name)
            case ast.alias(name=name) | ast.ImportFrom(module=str(name)):
                names.words.update(name.split("."))
            case ast.ClassDef(name=name) | ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                defined.add(name)
    names.words |= defined
    names.variables |= variables_of(text)


def _add_class(names: CodeNames, node: ast.ClassDef) -> None:
    members = names.members[node.name]
    members.update(_bound_names(node.body))
    names.bases[node.name].update(found[-1] for base in node.bases if (found := _WORD.findall(ast.unparse(base))))
    for inner in nodes_below(node):
        match inner:
            case ast.Attribute(value=ast.Name(id="self"), attr=name, ctx=ast.Store()):
                members.add(name)


def _bound_names(body: Sequence[ast.stmt]) -> Iterator[str]:
    """Yield the names that statements bind in their own scope."""
    for node in body:
        match node:
            case ast.ClassDef(name=name) | ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                yield name
            case ast.Import(names=aliases) | ast.ImportFrom(names=aliases):
                yield from (alias.asname or alias.name for alias in aliases)
            case _:
                yield from (each.id for each in nodes_below(node) if isinstance(each, ast.Name) and _is_stored(each))
                for inner in (getattr(node, part, []) for part in ("body", "orelse", "finalbody")):
                    yield from _bound_names(inner)


def _is_stored(node: ast.Name | ast.Attribute) -> bool:
    return isinstance(node.ctx, ast.Store)


def variables_of(text: str) -> set[str]:
    """Return the names of all arguments and variables of a module."""
    arguments = {node.arg for node in nodes_of_types(text, ast.arg)}
    return arguments | {node.id for node in nodes_of_types(text, ast.Name) if _is_stored(node)}
