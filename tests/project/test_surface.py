"""The public surface equals tests/data/surface.json, and the changelog announces every row that was removed."""

import json
import re
import subprocess
import sys
import warnings
from typing import Any

import pytest

import infer
import list_surface
from cases import cases
from list_surface import CHANGELOG, COMMAND, FILE, Rows, as_text, differences, unannounced, updated

STORED: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def found() -> dict[str, Rows]:
    """Return the rows of the code, found in another process: here all functions have wrappers that check shapes."""
    command = [sys.executable, list_surface.__file__, "--print"]
    surface: dict[str, Rows] = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
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
