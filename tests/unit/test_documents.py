"""The pages for users: links lead to files and their headings, and the benchmarks that they name exist and work."""

import ast
import re
from pathlib import Path
from typing import TypeGuard

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
LINK = re.compile(r"\]\(([^)\s]+)\)")


def anchors_of(page: Path) -> set[str]:
    """Return the anchors that GitHub gives to the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=[page.name for page in PAGES])
def test_every_link_of_a_page_leads_somewhere(page: Path) -> None:
    links = [link for link in LINK.findall(page.read_text(encoding="utf-8")) if "://" not in link]
    for link in links:
        name, _, anchor = link.partition("#")
        target = page.parent / name if name else page
        assert target.exists(), f"{page.name} links to {link}"
        assert not anchor or anchor in anchors_of(target), f"{page.name} links to {link}"
    assert links or page.name not in {"README.md", "benchmarks.md"}


# The benchmarks: docs/benchmarks.md is their index, and a command on a page must work.

BENCHMARKS = ROOT / "benchmarks"
SCRIPTS = sorted(path.name for path in BENCHMARKS.glob("*.py") if '__name__ == "__main__"' in path.read_text("utf-8"))
WORKERS = {"peer_worker.py", "serving_worker.py"}  # other scripts start these
# The log is history: scripts that it names may be gone.
TEXTS = [*(page for page in PAGES if page.name != "log.md"), *(ROOT / name for name in ("CHANGELOG.md", "Makefile"))]
NAMED = re.compile(r"\b((?:bench|check|count|gpu|kv)_\w+)\.py\b")
COMMAND = re.compile(r"python\s+benchmarks/(\w+\.py)((?:[^`\n]|(?<=[\w\"])\n(?=[\w\"-]))*)")


def named_scripts(path: Path) -> set[str]:
    return {f"{name}.py" for name in NAMED.findall(path.read_text(encoding="utf-8"))}


def options_of(script: str) -> dict[str, str]:
    """Return the options of a script with their help, by its calls."""
    found = {"--report": ""}
    for node in ast.walk(ast.parse((BENCHMARKS / script).read_text(encoding="utf-8"))):
        if not isinstance(node, ast.Call):
            continue
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        keywords = {each.arg: each.value for each in node.keywords}
        if name == "make_parser":
            found |= {f"--{each}": "" for each in keywords}
        elif name == "add_code_options":
            found |= dict.fromkeys(("--sources", "--sets", "--cpu"), "")
        elif name == "add_argument":
            strings = [each.value for each in ast.walk(keywords.get("help", ast.Constant(""))) if is_text(each)]
            found |= {str(ast.literal_eval(each)): " ".join(strings) for each in node.args if is_text(each)}
    return found


def is_text(node: ast.AST) -> TypeGuard[ast.Constant]:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def test_each_script_that_a_document_names_exists() -> None:
    for path in TEXTS:
        for name in named_scripts(path):
            assert any((ROOT / folder / name).exists() for folder in ("benchmarks", "scripts")), f"{path.name}: {name}"


def test_each_file_of_the_benchmarks_is_in_their_index() -> None:
    index = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    assert [path.name for path in BENCHMARKS.glob("*.py") if f"`{path.name}`" not in index] == []


def test_each_report_of_the_benchmarks_is_on_a_page() -> None:
    pages = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    assert [path.name for path in (BENCHMARKS / "reports").iterdir() if path.name not in pages] == []


@pytest.mark.parametrize("script", [script for script in SCRIPTS if script not in WORKERS])
def test_each_script_of_the_benchmarks_has_the_options_of_its_commands(script: str) -> None:
    options, source = options_of(script), (BENCHMARKS / script).read_text(encoding="utf-8")
    assert "make_parser(__doc__" in source
    texts = [path.read_text(encoding="utf-8") for path in (BENCHMARKS / script, *TEXTS)]
    commands = [rest for text in texts for name, rest in COMMAND.findall(text) if name == script]
    assert commands
    for command in commands:
        assert set(re.findall(r"(?<=\s)--[a-z-]+", command)) <= options.keys(), command
    assert not [text for text in options.values() if re.search(r"%(?![%(])", text)], "argparse formats the help"
