"""The check of names in docstrings, comments and pages finds the wrong ones, and takes no other program's for ours."""

import sys
from pathlib import Path

import pytest

import check_code_names
from check_code_names import faults_of_module, faults_of_page, main
from code_names import CodeNames, read_names

LOOP = '''"""The loop."""

from enum import Enum

STEPS = ["config.json", "other.toml", "pages", "a message"]


class Base:
    size: int = 1


class Loop(Base):
    """A loop."""

    def __init__(self, step):
        self.count = step

    @property
    def is_idle(self):
        """Return what STALE_WORD in a docstring does not define."""
        return self.count.tokens == 0

    class Kind(Enum):
        ONE = 1


class LoopError(ValueError):
    pass


def make_loop():
    def run(step):
        pass
'''


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A repository with a page and a package of two modules."""
    empty = ("src/infer/__init__.py", "src/infer/engine/__init__.py", "docs/dev/design.md", "README.md")
    files = {"src/infer/engine/step.py": "def plan(): pass\n", "src/infer/engine/requests/loop.py": LOOP}
    files["tests/engine/test_loop.py"] = "def test_a_claim(): pass\n"
    for path, text in (dict.fromkeys(empty, "") | files).items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    return tmp_path


@pytest.fixture
def names(root: Path) -> CodeNames:
    return read_names(root)


@pytest.mark.parametrize(
    "name",
    [
        *("Loop.tokens", "Base.count", "Kind.TWO", "Thread.count", "loop.plan", "loop.Base.count", "engine.gone"),
        *("engine.gone.Loop", "infer.loop", "thread.run", "engine/gone", "engine/gone.py", "kvcache/loop", "gone.py"),
        *("src/infer/gone", "tests/engine/test_gone*.py", "tests/engine/test_loop.py::test_a_promise", "make_thread"),
        *("message", "STALE_WORD"),
    ],
)
def test_a_name_that_the_code_lacks_is_found(name: str, names: CodeNames) -> None:
    (fault,) = faults_of_page(f"One.\n\nTwo `Loop.size`.\nSee `{name}`.\n", names)
    assert (fault.line, fault.name) == (4, name)


def test_an_attribute_of_a_variable_passes_only_in_a_module_that_has_the_variable(names: CodeNames) -> None:
    names.members["Step"] |= {"tokens"}
    assert not list(faults_of_module('def f(step):\n    """See `step.tokens`."""\n', names))
    assert [fault.name for fault in faults_of_module('"""See `step.tokens`."""\n', names)] == ["step.tokens"]


def test_docstrings_and_comments_are_read_with_their_lines(names: CodeNames) -> None:
    text = '''"""See tests/gone.py."""

x = "`gone_text`"  # a string is no comment; `gone_1`


class C:
    """One.

    Names may wrap: `loop.gone(1,
    2)`, and `gone_2`.
    """

    # A comment of two lines, `Loop.
    # gone`, and `gone_3`.
'''
    found = sorted((fault.line, fault.name) for fault in faults_of_module(text, names))
    assert found == [(1, "tests/gone.py"), (3, "gone_1"), (9, "loop.gone"), (10, "gone_2"), (14, "gone_3")]


def test_a_contract_in_a_block_lists_members_of_its_class(names: CodeNames) -> None:
    block = "One.\n\n```python\nLoop.count(step) / is_idle / {} -> Reply  # / no_member\nThing.size / x\n```\n"
    assert not list(faults_of_page(block.format("size"), names))
    (fault,) = faults_of_page(block.format("close"), names)
    assert (fault.line, fault.name) == (4, "Loop.close")


def test_a_wrong_name_fails_the_check_and_the_log_may_name_what_is_gone(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(check_code_names, "ROOT", root)
    monkeypatch.setattr(sys, "argv", ["check_code_names.py"])
    (root / "docs" / "dev" / "log.md").write_text("`Loop.gone` was slow.\n")
    assert main() == 0
    (root / "docs" / "dev" / "design.md").write_text("`Loop.gone` is fast.\n")
    assert main() == 1
    assert capsys.readouterr().out == "docs/dev/design.md:1: `Loop.gone`: Loop has no gone\n"


def test_each_folder_is_checked(root: Path) -> None:
    checked = {path.relative_to(root).parts[0] for path in check_code_names.files(root)}
    assert checked == {"README.md", "docs", "src", "tests"}
    assert {"src", "tests", "scripts", "benchmarks"} <= set(check_code_names.PYTHON_FOLDERS)
