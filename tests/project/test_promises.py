"""Each promise names tests that exist, and its words still appear in its page. house.toml limits their number.

The faults of scripts/plant_faults.py can still be planted. With INFER_TESTS=all, their tests fail for each.

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

import pytest

from cases import cases
from extent import IS_WHOLE
from plant_faults import Fault, main, plant, problem_of, read_faults

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


FAULTS = read_faults()


def test_each_fault_has_an_id_of_its_own_applies_to_one_place_and_names_tests() -> None:
    assert len({fault.id for fault in FAULTS}) == len(FAULTS)
    assert [problem for fault in FAULTS if (problem := problem_of(fault)) is not None] == []


@cases(
    "change problem",
    ({"file": "absent.py"}, r"A1: src/infer/absent\.py does not exist"),
    ({"old": "no such text"}, "A1: the old text occurs 0 times in .*'no such text'"),
    ({"old": "return"}, r"A1: the old text occurs \d+ times"),
    ({"tests": ["compute/backends/test_paged_attention.py::test_absent"]}, "A1: .*::test_absent does not exist"),
    ({"tests": []}, "A1: no test is named"),
)
def test_a_fault_that_cannot_be_planted_is_named(change: dict[str, object], problem: str) -> None:
    fault = next(fault for fault in FAULTS if fault.id == "A1")
    with pytest.raises(AssertionError, match=problem):
        raise AssertionError(problem_of(fault._replace(**change)))


def test_an_unknown_id_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["no-such-fault"])
    assert "no fault has the id no-such-fault" in capsys.readouterr().err


@pytest.mark.slow
def test_a_fault_without_an_effect_survives_and_the_sources_stay_as_they_are(tmp_path: Path) -> None:
    source, tests = tmp_path / "src" / "infer", tmp_path / "tests"
    for folder in (source, tests):
        folder.mkdir(parents=True)
    (source / "__init__.py").touch()
    (source / "half.py").write_text("def half(number):\n    return number // 2\n")
    (tests / "test_half.py").write_text("from infer.half import half\n\n\ndef test_half():\n    assert half(4) == 2\n")
    old, named = "number // 2", ["test_half.py::test_half"]
    faults = [
        Fault("rounds up", "no effect", "half.py", old, "-(-number // 2)", named),
        Fault("quarter", "seen", "half.py", old, "number // 4", named),
        Fault("broken", "seen", "half.py", old, "number //", named),
    ]
    assert [problem_of(fault, tmp_path) for fault in faults] == [None] * 3
    found = plant(faults, 1, tmp_path)
    assert found == {"rounds up": "survived", "quarter": "killed", "broken": "error"}
    assert old in (source / "half.py").read_text()


if IS_WHOLE:  # takes an hour

    @pytest.mark.slow
    @pytest.mark.parametrize("fault", FAULTS, ids=[fault.id for fault in FAULTS])
    def test_the_named_tests_see_the_fault(fault: Fault) -> None:
        assert plant([fault], 1) == {fault.id: "killed"}
