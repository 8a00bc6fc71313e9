"""The checks of text find faults: those of English, of names of code, of the list of modules, and of commits."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import check_code_names
import check_commits
import check_english
import list_modules
from cases import cases
from check_code_names import faults_of_module, faults_of_page
from check_english import docstring_faults, page_faults
from code_names import CodeNames, read_names

LONG = "word " * 31
BAD = '''def f():
    """What it does."""


class C:
    """Number of pages."""

    def g(self):
        """Of one."""
'''


@cases(
    "page lines",
    (f"One.\n\n{LONG}.\n", [3]),
    ("word " * 29 + "word.", []),
    (f"{'word ' * 20}. {'word ' * 20}.\n", []),
    (f"```\n{LONG}\n```\n\n{LONG}\n", [5]),
    (f"| {LONG} |\n# {LONG}\n", []),
    (f"- {'word ' * 20}\n- {'word ' * 20}\n", []),
)
def test_a_sentence_of_a_page_has_thirty_words_at_most(page: str, lines: list[int]) -> None:
    assert [line for line, _ in page_faults(page)] == lines


def test_a_docstring_that_begins_with_no_verb_fails_the_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "a.py"
    monkeypatch.setattr(check_english, "files", lambda: [file])
    monkeypatch.setattr(sys, "argv", ["check_english.py"])
    for text, count in ((BAD, 2), ("x = 1\n", 0)):
        file.write_text(text)
        assert len(list(docstring_faults(text))) == count
        assert check_english.main() == (count > 0)


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


def test_a_wrong_name_fails_the_check_and_the_log_may_name_what_is_gone(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(check_code_names, "ROOT", root)
    monkeypatch.setattr(sys, "argv", ["check_code_names.py"])
    (root / "docs" / "dev" / "log.md").write_text("`Loop.gone` was slow.\n")
    assert check_code_names.main() == 0
    (root / "docs" / "dev" / "design.md").write_text("`Loop.gone` is fast.\n")
    assert check_code_names.main() == 1
    assert capsys.readouterr().out == "docs/dev/design.md:1: `Loop.gone`: Loop has no gone\n"


LAYERS = """
[[tool.importlinter.contracts]]
type = "layers"
containers = ["infer"]
layers = ["llm", "engine", "errors"]
"""
MODULES = {"__init__": "A package.", "alone/__init__": "In no layer.", "engine/__init__": "The engine."}
MODULES |= {"errors": "Errors of `a | b`.\n\nMore.\n", "llm": "A model."}


def test_the_page_is_written_and_an_old_page_fails_the_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "pyproject.toml").write_text(LAYERS)
    for name, line in MODULES.items():
        (tmp_path / "infer" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "infer" / name).with_suffix(".py").write_text(f'"""{line}"""\n')
    for name, path in {"ROOT": tmp_path, "PACKAGE": tmp_path / "infer", "PAGE": tmp_path / "modules.md"}.items():
        monkeypatch.setattr(list_modules, name, path)
    monkeypatch.setattr(sys, "argv", ["list_modules.py"])
    assert list_modules.main() == 0
    page = (tmp_path / "modules.md").read_text()
    assert "| `errors` | Errors of `a &#124; b`. |" in page
    assert page.index("`llm`") < page.index("`errors`") < page.index("## `engine/`") < page.index("## `alone/`")
    monkeypatch.setattr(sys, "argv", ["list_modules.py", "--check"])
    assert list_modules.main() == 0
    (tmp_path / "infer" / "llm.py").write_text('"""Another model."""\n')
    assert list_modules.main() == 1
    assert capsys.readouterr().out == "modules.md is not up to date: run python scripts/list_modules.py\n"
    assert "Another" not in (tmp_path / "modules.md").read_text(), "the check writes nothing"


WHY = "Readers of the log did not see what had become faster."


class Repository:
    """A repository in a folder of a test."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.git("init", "--quiet", "--initial-branch=main")

    def git(self, *arguments: str) -> str:
        settings = {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull}
        person = {f"GIT_{role}_{key}": "a@b.c" for role in ("AUTHOR", "COMMITTER") for key in ("NAME", "EMAIL")}
        environment = {**os.environ, **settings, **person}
        return subprocess.check_output(["git", *arguments], cwd=self.root, env=environment, text=True).strip()

    def commit(self, message: str, path: str = "docs/page.md") -> str:
        """Change a file, commit it, and return the commit's id."""
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{message}\n")
        self.git("add", ".")
        self.git("commit", "--quiet", "--message", message)
        return self.git("rev-parse", "HEAD")


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Repository:
    """Return a repository whose first two commits break rules, the second of which is BASE."""
    made = Repository(tmp_path)
    made.commit("wip", "src/a.py")
    monkeypatch.setattr(check_commits, "BASE", made.commit("wip.", "src/b.py"))
    return made


Shown = Callable[..., tuple[int, list[str]]]


@pytest.fixture
def shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Shown:
    """Return a function that returns the status and the lines of a check."""
    return lambda root=tmp_path: (check_commits.main(root), capsys.readouterr().out.splitlines())


@cases(
    "title rule",
    ("Shorter lines", "at least 3 words"),
    ("Free the pages", None),
    ("A test follows a message", '"A"'),
    ("An answer ends here", '"An"'),
    ("The page says more", '"The"'),
    ("One function stores planes", '"One"'),
    ("Analyse the first page", None),
    ("Free pages of cancelled sequences.", "without a period"),
    (f"Free the {'x' * 91}", None),
    (f"Free the {'x' * 92}", "at most 100 characters, got 101"),
)
def test_a_title_is_a_verb_with_some_words(repository: Repository, shown: Shown, title: str, rule: str | None) -> None:
    repository.commit(title)
    status, lines = shown()
    assert len(lines) == 1
    assert status == (rule is not None)
    assert rule is None or (rule in lines[0] and title in lines[0])


@cases(
    "body path is_refused",
    ("", "src/infer/a.py", True),
    ("", "tests/src/test_a.py", False),
    (WHY, "src/infer/a.py", False),
    ("Because it failed often.", "src/infer/a.py", True),
    ("Because it failed too often.", "src/infer/a.py", False),
    ("Signed-off-by: Somebody With Many Names <a@b.c>\nFixes: number 12 of the old list", "src/infer/a.py", True),
    (f"{WHY}\n\nSigned-off-by: Somebody <a@b.c>", "src/infer/a.py", False),
)
def test_a_change_of_src_says_why(repository: Repository, shown: Shown, body: str, path: str, is_refused: bool) -> None:
    name = repository.commit(f"Free pages in time\n\n{body}", path)
    repository.commit("Describe the free pages")
    status, lines = shown()
    assert status == is_refused
    assert ([name[:8]] if is_refused else ["2"]) == [line.split()[0] for line in lines]


def test_each_commit_of_a_merged_branch_is_checked_but_not_the_merge(repository: Repository, shown: Shown) -> None:
    repository.git("checkout", "--quiet", "-b", "side")
    name = repository.commit("Free pages in time", "src/infer/a.py")
    repository.git("checkout", "--quiet", "main")
    repository.commit("Describe the free pages")
    repository.git("merge", "--quiet", "--no-ff", "--message", "Merge it", "side")
    status, lines = shown()
    assert status == 1
    assert [line.split()[0] for line in lines] == [name[:8]]


def test_a_clone_without_the_base_says_so_and_checks_later_commits_with_parents(
    repository: Repository, shown: Shown, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    repository.commit("Free pages in time", "src/infer/a.py")
    name = repository.commit("Shorter lines")
    shallow = tmp_path / "shallow"
    repository.git("clone", "--quiet", "--depth=2", f"file://{tmp_path}", str(shallow))
    monkeypatch.setattr(check_commits, "BASE_SECONDS", 0)
    status, (first, *others) = shown(shallow)
    assert status == 1
    assert first.endswith("is not in the history of this clone: only 1 later commits with parents are checked")
    assert [line.split()[0] for line in others] == [name[:8]], "the changes of the oldest commit are not known"
    monkeypatch.setattr(check_commits, "BASE_SECONDS", 1 << 40)
    status, (first, second) = shown(shallow)
    assert status == 0
    assert "only 0 later commits" in first, "all commits may be older than the base"
    assert second.startswith("0 commits")
