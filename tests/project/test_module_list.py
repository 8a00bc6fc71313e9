"""The list of modules has the first line of each one. `make lint` compares the whole page with the package."""

import sys
from pathlib import Path

import pytest

import list_modules
from list_modules import MissingLineError, first_line, main

SETTINGS = """
[[tool.importlinter.contracts]]
type = "layers"
containers = ["infer"]
layers = ["llm", "engine", "errors"]
"""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A repository with a package of nested packages."""
    (tmp_path / "pyproject.toml").write_text(SETTINGS)
    for path, line in {
        "__init__": "A package.",
        "alone/__init__": "In no layer.",
        "engine/__init__": "The engine.",
        "errors": "Errors of `a | b`.\n\nMore.\n",
        "llm": "A model.",
    }.items():
        (tmp_path / "infer" / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "infer" / path).with_suffix(".py").write_text(f'"""{line}"""\n')
    return tmp_path


@pytest.mark.parametrize("text", ["", "x = 1\n", '"""No full stop"""\n', '"""One\nline."""\n', '"""One.\nTwo."""\n'])
def test_a_module_without_a_first_line_is_named(text: str, tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(text)
    with pytest.raises(MissingLineError, match=r"a\.py: the docstring must begin with one line"):
        first_line(tmp_path / "a.py")


def test_the_page_is_written_and_an_old_page_fails_the_check(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, path in {"ROOT": root, "PACKAGE": root / "infer", "PAGE": root / "modules.md"}.items():
        monkeypatch.setattr(list_modules, name, path)
    monkeypatch.setattr(sys, "argv", ["list_modules.py"])
    assert main() == 0
    page = (root / "modules.md").read_text()
    assert "| `errors` | Errors of `a &#124; b`. |" in page
    assert page.index("`llm`") < page.index("`errors`") < page.index("## `engine/`") < page.index("## `alone/`")
    monkeypatch.setattr(sys, "argv", ["list_modules.py", "--check"])
    assert main() == 0
    (root / "infer" / "llm.py").write_text('"""Another model."""\n')
    assert main() == 1
    assert capsys.readouterr().out == "modules.md is not up to date: run python scripts/list_modules.py\n"
    assert "Another" not in (root / "modules.md").read_text(), "the check writes nothing"
