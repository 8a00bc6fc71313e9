"""The check of docstrings and pages finds their faults, and no file may get worse."""

import json
import sys
from pathlib import Path

import pytest

import check_english
from cases import cases
from check_english import docstring_faults, main, page_faults

LONG = "word " * 31
BAD = '''def f():
    """What it does."""


class C:
    """Number of pages."""

    def g(self):
        """Of one."""
'''


def test_a_docstring_must_not_begin_with_a_word_that_names_nothing() -> None:
    assert list(docstring_faults(BAD)) == [(2, "What it does."), (9, "Of one.")]
    assert not list(docstring_faults('"""Whatsoever."""\n\n\ndef f():\n    """Return what it does."""\n'))


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


def test_a_file_may_get_better_but_not_worse(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    allowed, file = tmp_path / "english.json", tmp_path / "a.py"
    for name, value in {"ROOT": tmp_path, "ALLOWED": allowed, "files": lambda: [file]}.items():
        monkeypatch.setattr(check_english, name, value)
    monkeypatch.setattr(sys, "argv", ["check_english.py"])
    file.write_text(BAD)
    allowed.write_text("{}")
    assert main() == 1, "a new file is allowed none"
    allowed.write_text('{"a.py": 2}')
    assert main() == 0
    file.write_text(BAD.replace("What it does", "Return it"))
    monkeypatch.setattr(sys, "argv", ["check_english.py", "--write"])
    assert main() == 0
    assert json.loads(allowed.read_text()) == {"a.py": 1}
    file.write_text(BAD)
    assert main() == 0
    assert json.loads(allowed.read_text()) == {"a.py": 1}, "what is allowed never rises"
    monkeypatch.setattr(sys, "argv", ["check_english.py"])
    assert main() == 1
