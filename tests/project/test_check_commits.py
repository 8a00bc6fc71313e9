"""The check of commits refuses titles and bodies that break a rule, and says what it cannot see."""

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

import check_commits
from cases import cases

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


def test_a_folder_without_a_history_is_said_to_be_unchecked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / ".git").write_text("gitdir: nowhere\n")
    assert check_commits.main(tmp_path) == 0
    assert capsys.readouterr().out.startswith("no commit is checked: ")


def test_the_whole_run_of_checks_includes_this_one() -> None:
    run = (check_commits.ROOT / ".ci/run").read_text()
    assert "\ntimed .venv/bin/python scripts/check_commits.py\n" in run
