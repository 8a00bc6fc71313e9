"""Rows that no object of the program lists: they are found in the syntax trees of its modules and in the pages."""

import ast
import re
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path

from infer.compute.quantization.ggml_types import GGML_TYPES
from infer.errors import InferError
from syntax import nodes_below

Row = tuple[str, str]
ROOT = Path(__file__).parents[2]
SOURCE, DOCS = ROOT / "src" / "infer", ROOT / "docs"
_VARIABLE = re.compile(r"(INFER|XDG|HF|CUDA|RAY|NUMBA|OMP|OCL)_\w+|NO_COLOR|VISUAL|EDITOR|TERM|HOME")
_WORTH_PARSING = re.compile(
    r"os\.environ\b|\benvvar=|\bcode\b|\b(?:refuse|error_line|BodyError|ApiError)\(|\w_delta\"|\"response\."
)
_CODE = re.compile(r"[a-z]+(_[a-z]+)*")
_MESSAGE_EVENT = re.compile(r"(message|content_block)_(start|stop|delta)|(text|thinking|input_json)_delta")
_RESPONSE_EVENT = re.compile(r"(?:response\.)?([a-z_]+\.(?:delta|added|done)|(?<=response\.)[a-z_]+)")
_FOR_DEVELOPERS = ("clients", "dev", "docs")
_CODE_PLACE = {"refuse": 2, "BodyError": 2, "ApiError": 4, "error_line": 0}  # the argument that is an error's code


def module_trees() -> Iterator[ast.Module]:
    """Yield the syntax trees of the modules in which one of the rows below can be."""
    for path in sorted(SOURCE.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        if _WORTH_PARSING.search(text):
            yield ast.parse(text)


def variable_rows(trees: Iterable[ast.Module]) -> Iterator[Row]:
    """Yield the environment variables that the code reads, and those that only the page names."""
    read = {name for tree in trees for name in _variables_of(tree)}
    page = set(re.findall(r"[A-Z]+(?:_[A-Z]+)+", (DOCS / "reference" / "environment.md").read_text(encoding="utf-8")))
    for name in read | {name for name in page if _VARIABLE.fullmatch(name)}:
        yield name, f"{'read' if name in read else 'read by a library'}{', documented' * (name in page)}"


def _variables_of(tree: ast.Module) -> Iterator[str]:
    """Yield the names that are looked up in the environment, and those that an option reads."""
    constants = _constants(tree)
    for node in nodes_below(tree):
        match node:
            case ast.Call(func=ast.Attribute(value=ast.Attribute(attr="environ"), attr="get"), args=[key, *_]):
                yield from _texts(key, constants)
            case ast.Subscript(value=ast.Attribute(attr="environ"), slice=key):
                yield from _texts(key, constants)
            case ast.Compare(left=key, ops=[ast.In() | ast.NotIn()], comparators=[ast.Attribute(attr="environ")]):
                yield from _texts(key, constants)
            case ast.keyword(arg="envvar", value=key):
                yield from _texts(key, constants)


def error_rows(trees: Iterable[ast.Module]) -> Iterator[Row]:
    """Yield the codes of errors: values of anything named `code`, and of arguments that are codes by their place."""
    codes = {text for tree in trees for text in _codes_of(tree) if _CODE.fullmatch(text)}
    for code in codes:
        yield code, "code of an error"


def _codes_of(tree: ast.Module) -> Iterator[str]:
    constants = _constants(tree)
    for node in nodes_below(tree):
        match node:
            case ast.keyword(arg="code", value=ast.expr() as value):
                yield from _texts(value, constants)
            case ast.Assign(targets=[ast.Name(id="code")], value=value):
                yield from _texts(value, constants)
            case ast.Assign(targets=[ast.Tuple(elts=[ast.Name(id="code"), *_])], value=ast.Tuple(elts=[value, *_])):
                yield from _texts(value, constants)
            case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name), args=arguments) if name in _CODE_PLACE:
                for value in arguments[_CODE_PLACE[name] :][:1]:
                    yield from _texts(value, constants)
            case ast.arguments(args=[*_, ast.arg(arg="code")], defaults=[*_, value]):
                yield from _texts(value, constants)


def event_rows(trees: Iterable[ast.Module]) -> Iterator[Row]:
    """Yield the types of the events in streams, as Anthropic's and OpenAI's protocols have them."""
    for tree in trees:
        for node in nodes_below(tree):
            text = node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""
            if _MESSAGE_EVENT.fullmatch(text):
                yield text, "/v1/messages"
            elif found := _RESPONSE_EVENT.fullmatch(text):
                yield f"response.{found[1]}", "/v1/responses"


def exit_rows() -> Iterator[Row]:
    """Yield the exit statuses: those that `main` sets, and those of the exceptions."""
    tree = ast.parse((ROOT / "src/infer/cli/__init__.py").read_text(encoding="utf-8"))
    found = {node.value for node in nodes_below(tree) if isinstance(node, ast.Assign) and "status" in ast.dump(node)}
    set_by_main = {each.value for value in found for each in nodes_below(value) if isinstance(each, ast.Constant)}
    page = (DOCS / "reference" / "command-line.md").read_text(encoding="utf-8")
    documented = {number for cells in _table_rows(page, "status") for number in cells[0].split(", ")}
    raised = {kind.exit_status for kind in (InferError, *_subclasses(InferError))}
    for status in {value for value in set_by_main if type(value) is int} | raised | {0}:
        yield str(status), "documented" if str(status) in documented else "not documented"


def _subclasses(cls: type[InferError]) -> Iterator[type[InferError]]:
    for each in cls.__subclasses__():
        yield each
        yield from _subclasses(each)


def extra_rows() -> Iterator[Row]:
    """Yield the extras of the package, and the commands that it installs."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    for extra, requirements in project["optional-dependencies"].items():
        names = sorted(re.split(r"[^\w.-]", each)[0] for each in requirements)
        yield f"{project['name']}[{extra}]", "for developers" if extra in _FOR_DEVELOPERS else ", ".join(names)
    for command in project["scripts"]:
        yield command, "a command"


def package_rows() -> Iterator[Row]:
    """Yield what an installation gives and needs, and the paths that configs of other programs name."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    yield "requires-python", project["requires-python"]
    for requirement in project["dependencies"]:
        yield f"needs {re.split(r'[^-.0-9A-Za-z_]', requirement)[0]}", "a dependency"
    yield from ((f"command {name}", target) for name, target in project["scripts"].items())
    yield from ((name, "in the package") for name in ("py.typed", "__main__.py") if (SOURCE / name).exists())
    applications = re.findall(r"import_path: (\S+)", (ROOT / "deploy" / "ray.yaml").read_text(encoding="utf-8"))
    yield from ((path, "an application of Ray") for path in applications)


def text_rows() -> Iterator[Row]:
    """Yield the headers of requests and answers, the names of loggers, and the fields of log lines."""
    for path in sorted(SOURCE.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        yield from ((name, "a header") for name in re.findall(r'"(x-[a-z-]+[a-z])"', text))
        for name in re.findall(r'"(infer\.[a-z_]+)"', text):
            place = SOURCE / name.removeprefix("infer.")
            if not place.with_suffix(".py").exists() and not (place / "__init__.py").exists():
                yield name, "a logger, or a field of a log line"


def model_rows() -> Iterator[Row]:
    """Yield the rows of the tables in the page of models, and the block types of GGUF files."""
    page = (DOCS / "reference" / "models.md").read_text(encoding="utf-8")
    for models, name, *others in _table_rows(page, "models"):
        yield name.strip("`"), " | ".join([models, *others])
    for files, sign in _table_rows(page, "files"):
        yield f"decoders without a mask, {files}", sign
    for kind in GGML_TYPES.values():
        yield kind.name, "type of GGUF tensors"


def _table_rows(page: str, heading: str) -> Iterator[list[str]]:
    """Yield the cells of the tables of a page whose first column has this heading."""
    is_open = is_wanted = False
    for line in page.splitlines():
        cells = [cell.strip() for cell in line.strip("| ").split(" | ")]
        if not line.startswith("|"):
            is_open = False
        elif not is_open:
            is_open, is_wanted = True, cells[0] == heading
        elif is_wanted and not line.startswith("|---"):
            yield cells


def _constants(tree: ast.Module) -> dict[str, ast.expr]:
    """Return the values of the names that a module assigns at its top."""
    found: dict[str, ast.expr] = {}
    for node in tree.body:
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                found[name] = value
            case ast.Assign(targets=[ast.Tuple(elts=names)], value=ast.Tuple(elts=values)):
                found |= {
                    each.id: value for each, value in zip(names, values, strict=False) if isinstance(each, ast.Name)
                }
    return found


def _texts(value: ast.expr, constants: dict[str, ast.expr]) -> Iterator[str]:
    """Yield the strings that an expression may have: itself, the sides of a choice, the value of a constant."""
    match value:
        case ast.Constant(value=str(text)):
            yield text
        case ast.IfExp(body=one, orelse=other):
            yield from (*_texts(one, constants), *_texts(other, constants))
        case ast.Name(id=name) if name in constants:
            yield from _texts(constants[name], {})
