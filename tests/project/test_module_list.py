"""The list of modules has every module of the package, in the order of its layers, with its first line."""

import sys
from pathlib import Path

import pytest

import list_modules
from list_modules import MissingLineError, first_line, layers_of, main, page_of

SETTINGS = """
[[tool.importlinter.contracts]]
type = "layers"
containers = ["infer"]
layers = ["llm", "serving.app | (files)", "engine", "errors"]

[[tool.importlinter.contracts]]
type = "layers"
containers = ["infer.engine"]
layers = ["steps", "answers"]

[[tool.importlinter.contracts]]
type = "forbidden"
source_modules = ["infer.errors"]
forbidden_modules = ["torch"]
"""
PAGE = """
## `infer`

A package.

| module | content |
|---|---|
| `llm` | A model. |
| `files` | Files. |
| `errors` | Errors of `a &#124; b`. |

## `serving/`

The server.

## `engine/`

The engine.

### `engine/steps/`

Steps.

| module | content |
|---|---|
| `plan` | A plan. |

#### `engine/steps/ends/`

Ends.

### `engine/answers/`

Answers.

## `alone/`

In no layer.
"""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A repository with a package of nested packages."""
    (tmp_path / "pyproject.toml").write_text(SETTINGS)
    for path, line in {
        "__init__": "A package.",
        "errors": "Errors of `a | b`.\n\nMore.\n",
        "files": "Files.",
        "llm": "A model.",
        "alone/__init__": "In no layer.",
        "engine/__init__": "The engine.",
        "engine/answers/__init__": "Answers.",
        "engine/steps/__init__": "Steps.",
        "engine/steps/plan": "A plan.",
        "engine/steps/ends/__init__": "Ends.",
        "serving/__init__": "The server.",
    }.items():
        (tmp_path / "infer" / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "infer" / path).with_suffix(".py").write_text(f'"""{line}"""\n')
    return tmp_path


def test_folders_of_any_depth_are_in_the_order_of_the_layers(root: Path) -> None:
    page = page_of(root / "infer", layers_of(root / "pyproject.toml"))
    assert page == list_modules.BEGINNING + PAGE


@pytest.mark.parametrize(
    "text", ["", "x = 1\n", '"""No full stop"""\n', '"""One sentence on\ntwo lines."""\n', '"""One.\nTwo."""\n']
)
def test_a_module_without_a_first_line_is_named(text: str, tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(text)
    with pytest.raises(MissingLineError, match=r"a\.py: the docstring must begin with one line"):
        first_line(tmp_path / "a.py")


def test_the_page_is_written_and_an_old_page_fails_the_check(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(list_modules, "ROOT", root)
    monkeypatch.setattr(list_modules, "PACKAGE", root / "infer")
    monkeypatch.setattr(list_modules, "PAGE", root / "modules.md")
    monkeypatch.setattr(sys, "argv", ["list_modules.py"])
    assert main() == 0
    assert (root / "modules.md").read_text() == list_modules.BEGINNING + PAGE
    monkeypatch.setattr(sys, "argv", ["list_modules.py", "--check"])
    assert main() == 0
    (root / "infer" / "llm.py").write_text('"""Another model."""\n')
    assert main() == 1
    assert capsys.readouterr().out == "modules.md is not up to date: run python scripts/list_modules.py\n"
    assert "Another" not in (root / "modules.md").read_text(), "the check writes nothing"


def test_the_page_of_this_package_is_up_to_date(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["list_modules.py", "--check"])
    assert main() == 0
