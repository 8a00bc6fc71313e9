"""The public surface equals tests/data/surface.json, and the changelog announces every row that was removed.

tests/helpers/public_calls.py uses every public name, and asserts the type of every result: mypy reads that file.
"""

import ast
import json
import re
import tomllib
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import infer
import infer.errors
from cases import cases
from list_surface import CHANGELOG, COMMAND, FILE, Rows, as_text, differences, unannounced, updated
from programs import Programs

STORED: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def found(programs: Programs) -> dict[str, Rows]:
    """Return the rows of the code, found in another process: here all functions have wrappers that check shapes."""
    surface: dict[str, Rows] = json.loads(programs.run("import list_surface; list_surface.main()", "--print").stdout)
    return surface


def test_the_file_has_the_rows_of_the_code(found: dict[str, Rows]) -> None:
    lines = differences(STORED, found)
    assert not lines, "\n".join(["the public surface has changed; the file is written by", COMMAND, *lines])
    assert updated(STORED, found)["removed"] == STORED["removed"], f"a removed row is there again: {COMMAND}"
    assert FILE.read_text(encoding="utf-8") == as_text(STORED), f"the file was edited by hand: {COMMAND}"


def test_the_changelog_names_every_removed_row() -> None:
    missing = unannounced(STORED, CHANGELOG.read_text(encoding="utf-8"))
    assert not missing, "\n".join(["CHANGELOG.md must name these under ### Removed:", *missing])


def test_rows_name_no_module_of_the_package(found: dict[str, Rows]) -> None:
    rows = [f"{name}: {promise}" for section in ("python", "commands") for name, promise in found[section].items()]
    assert [row for row in rows if re.search(r"\b[a-z_]+\.[A-Za-z_]+\b|\b0x[0-9a-f]{6}", row)] == []


def test_every_own_variable_that_the_code_reads_is_on_its_page(found: dict[str, Rows]) -> None:
    unlisted = {name for name, promise in found["environment variables"].items() if promise != "read, documented"}
    assert {name for name in unlisted if name.startswith("INFER_")} == {"INFER_POISON"}  # for tests


def test_every_exit_status_is_on_its_page(found: dict[str, Rows]) -> None:
    assert set(found["exit statuses"].values()) == {"documented"}


# The rule for removals, with a made-up surface.

BEFORE: dict[str, Rows] = {
    "python": {"LLM": "class", "LLM.run": "→ int", "LLM.run(n)": "int", "LLM.runs": "→ int"},
    "commands": {"infer go": "command"},
}
AFTER: dict[str, Rows] = {"python": {"LLM": "class", "LLM.runs": "→ int"}, "commands": {"infer go": "command"}}


def test_a_removed_row_needs_more_than_a_new_file() -> None:
    stored = updated(BEFORE, AFTER)
    assert differences(stored, AFTER) == []
    assert stored["removed"] == {"python": {"LLM.run": "→ int", "LLM.run(n)": "int"}}
    assert unannounced(stored, "### Added\n\n- `LLM.run`\n") == ["python: LLM.run", "python: LLM.run(n)"]
    again = updated(updated(stored, AFTER), AFTER)
    assert again == stored, "writing once more forgets nothing"


@cases(
    "changelog missing",
    ("### Removed\n\n- `LLM.run`: use `LLM.runs`.\n", []),
    ("### Removed\n\n- `LLM.run(n)`, which had no effect.\n", ["python: LLM.run"]),
    ("### Removed\n\n- `LLM`, `LLM.r` and LLM.run.\n", ["python: LLM.run", "python: LLM.run(n)"]),
    ("### Removed\n\n- nothing\n\n### Fixed\n\n- `LLM.run`\n", ["python: LLM.run", "python: LLM.run(n)"]),
    ("### Removed\n\n- nothing\n\n## [0.1.0]\n\n- `LLM.run`\n", ["python: LLM.run", "python: LLM.run(n)"]),
    ("### Removed\n\n- a thing\n\n## [0.1.0]\n\n### Removed\n\n- `LLM.run`\n", []),
)
def test_a_removed_name_is_announced_under_its_heading(changelog: str, missing: list[str]) -> None:
    assert unannounced(updated(BEFORE, AFTER), changelog) == missing


def test_a_longer_name_is_not_covered_by_a_shorter_one() -> None:
    stored = updated(BEFORE, {"python": {"LLM": "class"}, "commands": BEFORE["commands"]})
    assert unannounced(stored, "### Removed\n- `LLM.run`\n") == ["python: LLM.runs"]


def test_a_row_that_comes_back_is_no_longer_removed() -> None:
    assert updated(updated(BEFORE, AFTER), BEFORE) == {**BEFORE, "removed": {}}


def test_differences_name_new_rows_rows_that_are_gone_and_other_promises() -> None:
    after = {"python": {"LLM": "class", "LLM.run": "→ str", "LLM.runs": "→ int", "Tokenizer": "class"}}
    assert differences({**BEFORE, "removed": {"python": {"Old": "class"}}}, after) == [
        "- commands: infer go: command",
        "- python: LLM.run: → int",
        "+ python: LLM.run: → str",
        "- python: LLM.run(n): int",
        "+ python: Tokenizer: class",
    ]


def test_a_former_name_answers_with_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(infer._FORMER_NAMES, "Sampling", "SamplingParams")
    with pytest.warns(DeprecationWarning, match=r"infer\.Sampling has been renamed: use infer\.SamplingParams"):
        assert infer.Sampling is infer.SamplingParams
    with warnings.catch_warnings(action="error"):
        assert infer.SamplingParams.__name__ == "SamplingParams"


def test_former_names_lead_to_exported_names() -> None:
    assert set(infer._FORMER_NAMES.values()) <= set(infer.__all__)
    assert not set(infer._FORMER_NAMES) & set(infer.__all__)


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
