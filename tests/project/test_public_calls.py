"""tests/helpers/public_calls.py uses every public name, and asserts the type of every result: mypy reads that file."""

import ast
import json
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

import infer
import infer.errors

ROOT = Path(__file__).parents[2]
CALLS = ROOT / "tests" / "helpers" / "public_calls.py"
ROWS: dict[str, str] = json.loads((ROOT / "tests" / "data" / "surface.json").read_text(encoding="utf-8"))["python"]
MEMBER = re.compile(r"(\w+)\.(\w+)")
WITHOUT_RESULT = ("→ None", "async → None")
ANY = re.compile(r"(?:, |→ )Any(?!\])")  # a whole type, not an item of one
SPECIALS: dict[type[ast.AST], tuple[str, ...]] = {ast.Call: ("__call__",), ast.AsyncFor: ("__anext__",)}
SPECIALS |= {ast.With: ("__enter__", "__exit__"), ast.AsyncWith: ("__aenter__", "__aexit__")}
SPECIALS |= {ast.For: ("__iter__", "__next__")}
TYPED = ("field", "property")  # the file of the surface has the types of these


def used_members(tree: ast.Module, *, only_asserted: bool = False) -> set[str]:
    """Return the members, as "Class.member", that each function uses of the arguments that its signature annotates.

    With `only_asserted`, return those within `assert_type`.
    """
    found: set[str] = set()
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            class_by_name = {each.arg: ast.unparse(each.annotation) for each in function.args.args if each.annotation}
            for node in ast.walk(function):
                for name, member in () if only_asserted and not is_assertion(node) else members_in(node):
                    found.add(f"{class_by_name.get(name, name)}.{member}")
    return found


def is_assertion(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "assert_type"


def members_in(node: ast.AST) -> Iterator[tuple[str, str]]:
    """Yield the variables or classes in a part of a function, each with a member that the part uses."""
    match node:
        case (
            ast.With(items=[ast.withitem(context_expr=ast.Name(id=name))])
            | ast.AsyncWith(items=[ast.withitem(context_expr=ast.Name(id=name))])
            | ast.For(iter=ast.Name(id=name))
            | ast.AsyncFor(iter=ast.Name(id=name))
            | ast.Call(func=ast.Name(id=name))
        ):
            yield from ((name, special) for special in SPECIALS[type(node)])
    for each in ast.walk(node):
        if isinstance(each, ast.Attribute) and isinstance(each.value, ast.Name):
            yield each.value.id, each.attr


def public_members() -> dict[str, str]:
    """Return the methods and attributes of classes, but for errors that `infer` does not export."""
    errors = {name for name, value in vars(infer.errors).items() if isinstance(value, type)} - {*infer.__all__}
    members = {name: row for name, row in ROWS.items() if MEMBER.fullmatch(name) and not row.startswith(TYPED)}
    return {name: promise for name, promise in members.items() if name.partition(".")[0] not in errors}


@pytest.fixture(scope="module")
def tree() -> ast.Module:
    return ast.parse(CALLS.read_text(encoding="utf-8"))


def test_every_exported_name_is_used(tree: ast.Module) -> None:
    nodes = [node for node in tree.body if isinstance(node, ast.ImportFrom) and node.module == infer.__name__]
    assert {alias.name for node in nodes for alias in node.names} == {*infer.__all__, "__version__"}


def test_every_public_member_is_used(tree: ast.Module) -> None:
    assert len(public_members()) > 80
    assert sorted(public_members().keys() - used_members(tree)) == []


def test_every_result_has_its_type_asserted(tree: ast.Module) -> None:
    asserted = used_members(tree, only_asserted=True)
    with_result = {name for name, promise in public_members().items() if promise not in WITHOUT_RESULT}
    unasserted = {name for name in with_result - asserted if "__" not in name}
    assert unasserted == set()


def test_no_assertion_and_no_field_allows_any_type(tree: ast.Module) -> None:
    assert [node for node in ast.walk(tree) if is_assertion(node) and ast.unparse(node).endswith(", Any)")] == []
    fields = {name: row for name, row in ROWS.items() if MEMBER.fullmatch(name) and row.startswith(TYPED)}
    assert len(fields) > 120
    assert [name for name, row in fields.items() if ANY.search(row)] == ["RequestOptions.tool_choice"]


def test_mypy_reads_the_file() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["mypy"]
    assert settings["strict"]
    assert CALLS.relative_to(ROOT).as_posix() in settings["files"]


def test_a_member_counts_only_for_the_class_of_its_variable() -> None:
    text = "def f(llm: LLM, x: Session):\n  assert_type(llm.chat(x.token_ids), int)\n  with x:\n    llm.trim()"
    tree = ast.parse(text)
    asserted = {"LLM.chat", "Session.token_ids", "assert_type.__call__"}
    assert used_members(tree) == {*asserted, "Session.__enter__", "Session.__exit__", "LLM.trim"}
    assert used_members(tree, only_asserted=True) == asserted
