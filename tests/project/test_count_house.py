"""The counter of the project's size counts made-up sources right, and a limit only follows its number downwards."""

import json
import sys
from pathlib import Path

import pytest

import count_house
from house.limits import Limit, problems, read_limits, with_set, with_tightened
from house.sizes import count, naming_families, room_of, totals
from house.source import Source, num_lines_of, num_text_lines

SOURCE = '''"""The docstring of a module,

of three lines."""

# A comment.
import os  # noqa: F401


class AnswerTask:  # a comment that mentions noqa
    """One line."""

    def rows(self, shape: tuple[int, int, int, int], three: tuple[int, int, int]) -> "list[int]":
        """Return found."""
        text = """
# This line is text.

"""
        found, other = text, [found for found in shape]  # type: ignore[assignment]
        return found, f"{other}", "# fmt: off"
'''
LIMITS = """# A comment.
[falls]
'lines' = { limit = 1000, goal = 500 }
'lines of C++' = { limit = 10 }

[rises]
'faults' = { limit = 200 }

[bounds]
'median' = { limit = 150 }

[flow]
'chat: functions' = { limit = 800, goal = 480 }
"""


def source(text: str, path: str = "src/infer/cli/a.py") -> Source:
    return Source(path, text)


def test_a_line_of_code_has_a_token_that_is_no_comment_and_no_docstring() -> None:
    assert source(SOURCE).num_code_lines == 9
    assert source(SOURCE).num_lines == 19
    assert source("# Only a comment.\n\n").num_code_lines == 0


def test_functions_classes_and_signatures_are_counted() -> None:
    counted = source(SOURCE)
    assert [num_lines_of(function) for function in counted.functions] == [8]
    assert counted.class_names == ["AnswerTask"]
    assert counted.num_long_tuples == 1
    assert source("def f() -> dict[str, tuple[int, int, int, str]]: ...\n").num_long_tuples == 1
    assert source("x: tuple[int, int, int, int]\ndef f(a: tuple[int, ...]): ...\n").num_long_tuples == 0
    assert counted.num_statements == 9, "docstrings too"


def test_variables_are_counted_where_they_are_bound() -> None:
    assert source(SOURCE).num_variables("found") == 2
    assert source("def f(found): return found\n").num_variables("found") == 1


@pytest.mark.parametrize(
    "comment", ["# noqa", "# NOQA: E501", "# ruff: noqa", "# flake8: noqa", "#noqa", "# why  # noqa"]
)
def test_each_spelling_of_a_comment_counts(comment: str) -> None:
    assert source(f"x = 1  {comment}\n").num_comments("noqa") == 1


def test_comments_are_counted_outside_of_texts() -> None:
    counted = {words: source(SOURCE).num_comments(words) for words in ("noqa", "fmt:", "type: ignore")}
    assert counted == {"noqa": 1, "fmt:": 0, "type: ignore": 1}


def test_lines_of_other_files_are_no_longer_than_120() -> None:
    assert num_text_lines("a\n\n  \nb\n") == 2
    assert num_text_lines("x" * 241) == 3


def test_a_family_is_named_as_a_whole_word_outside_the_tables() -> None:
    table = source('FAMILIES: dict[str, int] = {"llama": 1, "qwen3_moe": 2}\n', "src/infer/models/families/table.py")
    named = {
        "a.py": 'x = "the llama model"\n',
        "b.py": "is_qwen3_moe = 1\n",
        "c.py": 'x = "qwen3moe"\n',
        "d.py": "class LlamaAsked: ...\n",
        "e.py": 'x = f"{1} llama"\n',
    }
    unnamed = {
        "f.py": '"""Like llama."""\n# llama\nx = "llama.cpp, ollama, llamacpp, llamas"\n',
        "formats.py": 'x = "llama"\n',
    }
    sources = [table, *(source(text, f"src/infer/files/{name}") for name, text in {**named, **unnamed}.items())]
    assert list(naming_families(sources)) == [f"src/infer/files/{name}" for name in named]


def test_folders_belong_to_the_same_rooms_before_and_after_the_move() -> None:
    rooms = {"llm.py": "top", "bench/a.py": "cli", "cli/bench/a.py": "cli", "server/routes/chat.py": "serving"}
    rooms |= {"serving/server/routes/chat.py": "serving", "gguf_export/a.py": "models and files"}
    assert {path: room_of(f"src/infer/{path}") for path in rooms} == rooms
    with pytest.raises(ValueError, match="src/infer/utils belongs to no room"):
        room_of("src/infer/utils/a.py")


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """Return the folder of a made-up repository, with all that is counted."""
    files = {
        "src/infer/families.py": 'FAMILIES: dict[str, int] = {"llama": 1, "qwen3": 2}\n',
        "src/infer/cli/long.py": "def f():\n" + "    x = 1\n" * 400,
        "src/infer/cli/__init__.py": "",
        "src/infer/cli/__pycache__/old.py": "x = 1\n",
        "src/infer/serving/web_ui/main.js": "a\nb\n",
        "src/infer/py.typed": "",
        "tests/test_a.py": "x = 1\n\n# fmt: off\ny = 1  # noqa: E501\n",
        "benchmarks/b.py": "x = 1\n",
        "scripts/c.py": "x = 1\ny = 1\n",
        "tests/data/json-schemas.json": "[\n]\n",
        "tests/data/cases.json": "[\n1,\n2\n]\n",
        "tests/data/planted-faults.toml": '[[fault]]\nid = "A"\n[[fault]]\nid = "B"\n',
        "docs/models.md": "| a | b |\n|---|---|\n| 1 | 2 |\n<!-- what loads: x -->\n| models | proven |\n|---|---|\n"
        "| Llama | a, b, c |\n| Qwen | a |\n<!-- end of what loads -->\n| Other | a |\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def test_a_repository_is_counted(repository: Path) -> None:
    expected = {"lines of cli": 401, "lines of top": 1, "lines of src/infer": 402, "files": 3}
    expected |= {"statements": 402, "files under 30 lines of code": 1, "files above 400 lines": 1}
    expected |= {"files above 600 lines": 0, "functions above 40 lines": 1, "functions above 50 lines": 1}
    expected |= {"lines of the median file": 1, "lines of .js files": 2, "lines of new test data": 4}
    expected |= {"lines of tests": 2, "lines of benchmarks": 1, "lines of scripts": 2, "lines of examples": 0}
    expected |= {'comments "noqa"': 1, 'comments "fmt:"': 1, "planted faults": 2, "families": 2}
    expected |= {"rows of docs/models.md": 2, "settings proven in docs/models.md": 4}
    numbers = totals(count(repository))
    assert {name: numbers[name] for name in expected} == expected
    assert not any(".typed" in name for name in numbers)


def test_the_files_that_grew_are_named(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = count(repository)
    (repository / "src/infer/cli/new.py").write_text("x = 1\n" * 7)
    now = count(repository)
    monkeypatch.setattr(count_house, "counts_at_last_limits", lambda: before)
    (line,) = count_house.report({"lines of cli": 408}, {"lines of cli": Limit("falls", 401, 300)}, now)
    assert "408 is above its limit 401, goal 300" in line
    assert line.endswith("grown since the limits changed: src/infer/cli/new.py +7")


@pytest.mark.parametrize(
    ("section", "limit", "kept", "broken", "loose"),
    [
        ("falls", 1000, [1000, 980], [1001], [979]),
        ("falls", 10, [10], [11], [9]),
        ("rises", 200, [200, 204], [199], [205]),
        ("bounds", 150, [150, 1], [151], []),
        ("flow", 800, [800, 768], [801], [767]),
        ("flow", 45, [45, 43], [46], [42]),
    ],
)
def test_a_limit_is_kept_within_a_few_per_cent(
    section: str, limit: int, kept: list[int], broken: list[int], loose: list[int]
) -> None:
    messages = {number: Limit(section, limit).problem("x", number) for number in [*kept, *broken, *loose]}
    assert [number for number, message in messages.items() if message is None] == kept
    assert [number for number, message in messages.items() if message and "--set" in message] == broken
    assert [number for number, message in messages.items() if message and "--lower" in message] == loose


def test_a_number_without_a_limit_and_a_limit_without_a_number_are_problems() -> None:
    limits = read_limits(LIMITS)
    numbers = {"lines": 1000, "lines of C++": 10, "faults": 200, "median": 100}
    assert problems(numbers, limits) == {}
    assert list(problems({**numbers, "lines of .lark files": 1}, limits)) == ["lines of .lark files"]
    del numbers["faults"]
    assert list(problems(numbers, limits)) == ["faults"]


def limits_in(text: str) -> dict[str, int]:
    return {name: limit.limit for name, limit in (read_limits(text) | read_limits(text, flow=True)).items()}


def test_lowering_loosens_no_limit() -> None:
    better = {"lines": 999, "lines of C++": 7, "faults": 201, "median": 100, "chat: functions": 700}
    lowered = with_tightened(LIMITS, better)
    assert limits_in(lowered) == {**better, "median": 150, "chat: functions": 707}
    assert lowered.startswith("# A comment.\n[falls]\n'lines' = { limit = 999, goal = 500 }\n")
    worse = {"lines": 1001, "lines of C++": 11, "faults": 199, "median": 151, "chat: functions": 801}
    assert with_tightened(LIMITS, worse) == LIMITS
    assert with_tightened(LIMITS, {"chat: functions": 770}) == LIMITS, "within 4 % it may be noise"


def test_setting_changes_only_the_named_limits() -> None:
    numbers = {"lines": 1200, "lines of C++": 12, "faults": 190, "median": 160}
    assert limits_in(with_set(LIMITS, numbers, ["lines"])) == {**limits_in(LIMITS), "lines": 1200}
    assert limits_in(with_set(LIMITS, numbers, [])) == {**numbers, "median": 150, "chat: functions": 800}
    for name in ("median", "chat: functions", "words"):
        with pytest.raises(ValueError, match=f"named '{name}', only: lines, "):
            with_set(LIMITS, numbers, [name])


def run(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(sys, "argv", ["count_house.py", *arguments])
    return count_house.main()


def test_the_command_checks_lowers_and_sets(
    repository: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    numbers = totals(count(repository))
    rows = [f"'{name}' = {{ limit = {number} }}\n" for name, number in numbers.items()]
    limits = repository / count_house.LIMITS
    limits.write_text("[falls]\n" + "".join(rows))
    numbers = totals(count(repository))  # the limits are lines of data, too
    monkeypatch.setattr(count_house, "ROOT", repository)
    monkeypatch.setattr(count_house, "counts_at_last_limits", dict)
    assert run(["--check"], monkeypatch) == 1
    assert "lines of new test data" in capsys.readouterr().out
    assert run(["--lower"], monkeypatch) == 0
    assert run(["--check"], monkeypatch) == 1
    assert run(["--set", "lines of new test data"], monkeypatch) == 0
    assert run(["--check"], monkeypatch) == 0
    capsys.readouterr()
    assert run(["--json"], monkeypatch) == 0
    assert json.loads(capsys.readouterr().out) == numbers
    assert run([], monkeypatch) == 0
    assert any(line.split() == ["lines", "of", "cli", "401", "401"] for line in capsys.readouterr().out.splitlines())
