"""Each promise names tests that exist, and its words still appear in its page. house.toml limits their number.

No test is run here: the files are only parsed.
"""

import ast
import re
import tomllib
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from cases import cases

ROOT = Path(__file__).parents[2]
THIS_FILE = Path(__file__).relative_to(ROOT).as_posix()
FILE = ROOT / "tests" / "data" / "promises.toml"
MOST_UNTESTED = 15
FEWEST_CHARACTERS = 12  # of a quote, which must find its sentence
SOURCES = {*(f"document 00{number}" for number in range(5)), "plan: semantics", "plan: reliability", "plan: serving"}
ROWS: dict[str, list[dict[str, Any]]] = tomllib.loads(FILE.read_text(encoding="utf-8"))
ALL_ROWS = [*ROWS["promise"], *ROWS["untested"]]


@cache
def pages() -> set[str]:
    """Return the pages for users: the README, and all of docs/ except the part for developers."""
    docs = {page.relative_to(ROOT).as_posix() for page in (ROOT / "docs").rglob("*.md")}
    return {"README.md", *(page for page in docs if not page.startswith("docs/dev/"))}


@cache
def names_in(path: str) -> frozenset[str]:
    """Return the tests of a file as pytest names them, without parameters."""
    file = ROOT / path
    if not file.is_file():
        return frozenset()
    return frozenset(names_of_tests(ast.parse(file.read_text(encoding="utf-8")).body))


def names_of_tests(nodes: list[ast.stmt]) -> Iterator[str]:
    """Yield the names of test functions that are not skipped, those of test classes behind the name of the class."""
    for node in nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
            if not any(re.search(r"\bmark\.(skip|xfail)\b", ast.unparse(each)) for each in node.decorator_list):
                yield node.name
        elif isinstance(node, ast.ClassDef) and node.name.startswith("Test"):
            yield from (f"{node.name}::{name}" for name in names_of_tests(node.body))


@cache
def words_of(page: str) -> str:
    """Return the text of a page, with one space in place of any others."""
    return " ".join((ROOT / page).read_text(encoding="utf-8").split())


def faults_of(row: dict[str, Any]) -> Iterator[str]:
    """Yield what is wrong with a row: its tests, its page, or the words of the page."""
    for test in row.get("tests", ()):
        path, _, name = test.partition("::")
        if name not in names_in(path):
            yield f"there is no test {test}"
    where, quote = row["where"], row.get("quote")
    if where in SOURCES:
        return
    if where not in pages():
        yield f"{where} is no page and no source"
    elif not quote or len(quote) < FEWEST_CHARACTERS:
        yield f"the quote is shorter than {FEWEST_CHARACTERS} characters: {quote}"
    elif " ".join(quote.split()) not in words_of(where):
        yield f"{where} does not say: {quote}"


def test_each_promise_has_its_tests_and_its_words_in_the_page() -> None:
    assert [f"{row['says']} {fault}" for row in ALL_ROWS for fault in faults_of(row)] == []


@cases(
    "changes fault",
    ({}, None),
    ({"quote": "All   models\nload from safetensors"}, None),
    ({"quote": "No model loads"}, "README.md does not say: No model loads"),
    ({"quote": "a model"}, "the quote is shorter than 12 characters: a model"),
    ({"where": "docs/none.md"}, "docs/none.md is no page and no source"),
    ({"where": "document 005"}, "document 005 is no page and no source"),
    ({"where": "document 004", "quote": None}, None),
    ({"tests": ["tests/project/test_promises.py::test_nothing"]}, "test_promises.py::test_nothing"),
    ({"tests": ["tests/project/test_none.py::test_nothing"]}, "test_none.py::test_nothing"),
    ({"tests": ["tests/project/test_promises.py::faults_of"]}, "test_promises.py::faults_of"),
)
def test_a_wrong_row_is_found(changes: dict[str, Any], fault: str | None) -> None:
    good = {"where": "README.md", "quote": "All models load", "tests": [f"{THIS_FILE}::test_a_wrong_row_is_found"]}
    found = list(faults_of(good | changes))
    assert len(found) == (fault is not None)
    assert fault is None or found[0].endswith(fault)


def test_tests_of_classes_have_the_name_of_their_class() -> None:
    lines = ["class TestA:", "    def test_b(self): ...", "    def c(self): ...", "async def test_d(): ..."]
    lines += ["class B:", "    def test_e(self): ...", "@pytest.mark.skip", "def test_f(): ...", "@mark.xfail()"]
    lines += ["def test_g(): ..."]
    assert list(names_of_tests(ast.parse("\n".join(lines)).body)) == ["TestA::test_b", "test_d"]


def test_every_page_and_every_source_has_promises() -> None:
    assert {row["where"] for row in ROWS["promise"]} == pages() | SOURCES


def test_promises_are_said_once_in_a_sentence() -> None:
    said = Counter(" ".join(row["says"].lower().split()) for row in ALL_ROWS)
    assert [sentence for sentence, count in said.items() if count > 1] == []
    assert [sentence for sentence in said if not sentence.endswith(".")] == []
    assert all(row.keys() - {"quote"} == {"says", "where", "tests"} and row["tests"] for row in ROWS["promise"])
    assert [row["says"] for row in ROWS["promise"] if len(set(row["tests"])) < len(row["tests"])] == []


def test_few_promises_have_no_test_and_each_has_a_reason() -> None:
    assert len(ROWS["untested"]) <= MOST_UNTESTED
    assert all(row.keys() == {"says", "where", "quote", "reason"} for row in ROWS["untested"])
