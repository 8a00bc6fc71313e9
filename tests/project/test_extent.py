"""`make test` runs a test for each promise and leaves the rest out, `make near` finds the tests beside a file.

A process that a test starts says where it hangs.
"""

import ast
import subprocess
import tomllib
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import extent
from cases import cases
from near_tests import ROOT, near
from watched import python_command, script_command

SLOW = "pytest.mark.slow"


class Item(SimpleNamespace):
    """A test as pytest collects it, with the closest mark `slow`, if it has one."""

    def __init__(self, nodeid: str, mark: dict[str, int] | None) -> None:
        super().__init__(nodeid=nodeid, path=Path(nodeid.partition("::")[0]), mark=mark)

    def __hash__(self) -> int:
        return hash(self.nodeid)

    def get_closest_marker(self, name: str) -> Any:
        return None if self.mark is None or name != "slow" else SimpleNamespace(kwargs=self.mark)


def split(*items: tuple[str, dict[str, int] | None]) -> tuple[list[str], list[str]]:
    kept, left_out = extent.split([Item(*item) for item in items])  # type: ignore[misc]
    return [item.nodeid for item in kept], [item.nodeid for item in left_out]


def test_a_slow_test_is_left_out_and_the_others_keep_their_order() -> None:
    assert split(("b.py::b", None), ("b.py::a", {}), ("a.py::a", None)) == (["b.py::b", "a.py::a"], ["b.py::a"])


@pytest.mark.parametrize(("cases", "kept"), [(1, [3]), (2, [1, 4]), (3, [1, 3, 5]), (6, [*range(6)]), (9, [*range(6)])])
def test_some_cases_are_spread_over_all(cases: int, kept: list[int]) -> None:
    names = [f"a.py::test[{index}]" for index in range(6)]
    assert split(*((name, {"cases": cases}) for name in names))[0] == [names[index] for index in kept]


def test_the_rest_is_limited_too_but_not_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    items = [Item(f"a.py::test[{index}]", {"cases": 1, "rest": 2}) for index in range(6)]
    left_out = extent.split(items)[1]  # type: ignore[arg-type]
    assert [item.nodeid for item in extent.rest_of(left_out)] == ["a.py::test[1]", "a.py::test[4]"]
    monkeypatch.setattr(extent, "IS_WHOLE", True)
    assert extent.rest_of(left_out) == left_out


def test_cases_are_counted_for_each_function_and_a_slow_case_is_none_of_them() -> None:
    items = [("a.py::a[0]", {"cases": 1}), ("a.py::a[1]", {}), ("a.py::b[0]", {"cases": 1})]
    items += [("b.py::a[0]", {"cases": 1})]
    assert split(*items)[1] == ["a.py::a[1]"]


@cases(
    "text is_left_out",
    ("import pytest\n\npytestmark = pytest.mark.slow\n", True),
    ("pytestmark = pytest.mark.slow  # trains a model\n", True),
    ("pytestmark = pytest.mark.slow(cases=1)\n", False),
    ("pytestmark = pytest.mark.slow\n\n\n@pytest.mark.slow(cases=1)\ndef test_a(): ...\n", False),
    ("@pytest.mark.slow\ndef test_a(): ...\n", False),
    ("    pytestmark = pytest.mark.slow\n", False),
)
def test_a_file_with_only_slow_tests_is_not_imported(text: str, is_left_out: bool) -> None:
    assert extent.has_only_slow_tests(text) is is_left_out


@cache
def functions_of_make_test(path: str) -> frozenset[str]:
    """Return the functions of a file, as pytest names them without parameters, of which `make test` runs a case."""
    text = (ROOT / path).read_text(encoding="utf-8")
    tree = ast.parse(text)
    assigned = (node for node in tree.body if isinstance(node, ast.Assign))
    marks = [ast.unparse(node.value) for node in assigned if "pytestmark" in ast.unparse(node)]
    return frozenset(
        f"{owner.name}::{node.name}" if isinstance(owner, ast.ClassDef) else node.name
        for owner in (tree, *tree.body)
        for node in getattr(owner, "body", ())
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and is_run([ast.unparse(each) for each in node.decorator_list], marks)
    )


def is_run(own: list[str], marks: list[str]) -> bool:
    """Return True if `make test` runs a function with these decorators, in a file with these marks."""
    closest = [mark for mark in own if mark.startswith(SLOW)] or [mark for mark in marks if SLOW in mark]
    return all("cases=" in mark for mark in closest)


def test_make_test_runs_a_test_for_each_promise() -> None:
    rows = tomllib.loads((ROOT / "tests" / "data" / "promises.toml").read_text(encoding="utf-8"))["promise"]
    missing = [row["says"] for row in rows if not any(is_in_make_test(test) for test in row["tests"])]
    assert missing == []


def is_in_make_test(test: str) -> bool:
    path, _, name = test.partition("::")
    return name in functions_of_make_test(path)


@pytest.mark.slow
def test_every_module_has_tests_beside_it() -> None:
    modules = (ROOT / "src" / "infer").rglob("*.py")
    assert [path for path in modules if not near(path.relative_to(ROOT).as_posix())] == []


# Processes that tests and the fuzzer start


def test_a_process_that_hangs_says_where_and_ends() -> None:
    code = "import time\ndef wait_for_ever():\n    time.sleep(60)\nwait_for_ever()"
    done = subprocess.run(python_command(code, seconds=0.1), capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "in wait_for_ever" in done.stderr


def test_a_script_is_run_with_its_arguments_beside_its_modules(tmp_path: Path) -> None:
    (tmp_path / "neighbour.py").write_text("NAME = 'neighbour'")
    script = tmp_path / "script.py"
    script.write_text("import sys, neighbour\nprint(__name__, neighbour.NAME, *sys.argv)")
    done = subprocess.run(script_command(script, 1, "two"), capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == (f"__main__ neighbour {script} 1 two\n", "")
