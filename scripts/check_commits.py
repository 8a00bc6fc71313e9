"""Check that the commits since BASE say what they change, and why.

    python scripts/check_commits.py            check the commits from BASE to HEAD

A title has three words at least and 100 characters at most. It begins with a verb, so with no article and not with
"One", and it ends without a period. A commit that changes src/ has a body of at least five words beside its trailers.
Merges are not checked.

A clone may lack BASE, because it is shallow or because its commits were joined. Then one line says so, and only commits
that are younger than BASE are checked, if the clone has their parents: without these, nobody sees what they change.
"""

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
BASE = "66fb447f54b35e0d4bd0134210d2dd26d9e06a07"
BASE_SECONDS = 1795889452  # the time of BASE's author, which rewriting keeps
TITLE_WORDS = 3
TITLE_CHARACTERS = 100
BODY_WORDS = 5
NO_VERB = {"a", "an", "the", "one"}
_FORMAT = "%H%x1f%P%x1f%at%x1f%s%x1f%b%x1f%(trailers:only)%x1e"


@dataclass(frozen=True)
class Commit:
    """A commit's id, parents and author time, and its message in parts."""

    id: str
    parents: tuple[str, ...]
    author_seconds: int
    title: str
    body: str
    trailers: str


class GitError(Exception):
    """A command of git that failed, with its first line of explanation."""


def git(root: Path, *arguments: str) -> str:
    """Return the output of a command of git.

    Raises:
        GitError: The command failed, or there is no git.
    """
    try:
        done = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, encoding="utf-8")
    except FileNotFoundError as error:
        raise GitError("git is not installed") from error
    if done.returncode:
        raise GitError((done.stderr.strip() or f"git {arguments[0]} failed").splitlines()[0])
    return done.stdout


def has_base(root: Path) -> bool:
    """Return True if BASE is among the commits before HEAD."""
    try:
        git(root, "merge-base", "--is-ancestor", BASE, "HEAD")
    except GitError:
        return False
    return True


def read_commits(root: Path, commits: str) -> Iterator[Commit]:
    """Yield the commits of a range, from the latest to the first, without merges."""
    for record in git(root, "log", "--no-merges", f"--format={_FORMAT}", commits).split("\x1e")[:-1]:
        name, parents, seconds, title, body, trailers = record.strip("\n").split("\x1f")
        yield Commit(name, tuple(parents.split()), int(seconds), title, body, trailers)


def title_faults(title: str) -> Iterator[str]:
    """Yield a rule for each way in which a title breaks it."""
    words = [word for word in title.split() if any(map(str.isalpha, word))]
    if len(words) < TITLE_WORDS:
        yield f"a title needs at least {TITLE_WORDS} words"
    if words and words[0].lower() in NO_VERB:
        yield f'a title begins with a verb, not with "{words[0]}"'
    if title.endswith("."):
        yield "a title ends without a period"
    if len(title) > TITLE_CHARACTERS:
        yield f"a title has at most {TITLE_CHARACTERS} characters, got {len(title)}"


def num_reasons(commit: Commit) -> int:
    """Return the number of words of a body, without the lines of its trailers."""
    trailers = set(commit.trailers.splitlines())
    lines = (line for line in commit.body.splitlines() if line not in trailers)
    return sum(any(map(str.isalpha, word)) for line in lines for word in line.split())


def faults_of(root: Path, commit: Commit) -> Iterator[str]:
    """Yield what is wrong with a commit, as one line per rule."""
    yield from title_faults(commit.title)
    if num_reasons(commit) < BODY_WORDS and git(root, "show", "--format=", "--name-only", commit.id, "--", "src"):
        yield f"a commit that changes src/ needs a body that says why, of at least {BODY_WORDS} words"


def commits_to_check(root: Path) -> list[Commit]:
    """Return the commits since BASE, or those that a clone without BASE can judge, and say which they are."""
    if has_base(root):
        return list(read_commits(root, f"{BASE}..HEAD"))
    found = [each for each in read_commits(root, "HEAD") if each.parents and each.author_seconds > BASE_SECONDS]
    print(f"{BASE[:8]} is not in the history of this clone: only {len(found)} later commits with parents are checked")
    return found


def main(root: Path = ROOT) -> int:
    """Print each fault, and return the exit status."""
    try:
        commits = commits_to_check(root)
    except GitError as error:
        print(f"no commit is checked: {error}")
        return 0
    shown = [f"{each.id[:8]} {each.title!r}: {fault}" for each in commits for fault in faults_of(root, each)]
    print("\n".join(shown) if shown else f"{len(commits)} commits say what they change and why")
    return 1 if shown else 0


if __name__ == "__main__":
    sys.exit(main())
