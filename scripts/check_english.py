"""Check that docstrings and pages are easy to read.

    python scripts/check_english.py            show each fault of all files
    python scripts/check_english.py FILE …     show each fault of these files

A fault is a docstring that begins with a word such as "What", "Of" or "Where", one of a function that begins without a
verb, or a sentence of more than 30 words on a page of docs/ or in the README.
"""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from syntax import DEFINITIONS, nodes_of_types

ROOT = Path(__file__).parents[1]
FOLDERS = ("src", "benchmarks", "scripts", "tests", "examples")
WORDS_PER_SENTENCE = 30
BAD_BEGINNINGS = {"what", "whatever", "whether", "where", "wherever", "who", "whoever", "whose", "which"}
BAD_BEGINNINGS |= {"of", "that", "those", "as", "it", "they"}
# The first sentence of a function that begins so has no verb: it should say what the function does.
NO_VERB = {"a", "an", "the", "all", "each", "for", "how", "its", "in", "none", "on", "one", "raises", "with"}
NO_VERB |= {"number", "seconds", "true", "false"}
_FENCE = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
_NO_PROSE = re.compile(r"^(\||#|!\[|    ).*$", re.MULTILINE)
_LINK = re.compile(r"\]\([^)]*\)")
_END = re.compile(r"(?<=[.!?:])\s+|\n\s*\n|\n\s*[-*] ")


def docstring_faults(text: str) -> Iterator[tuple[int, str]]:
    """Yield the line and the first words of each docstring that begins badly."""
    for node in nodes_of_types(text, ast.Module, *DEFINITIONS):
        words = (ast.get_docstring(node) or "").split()
        bad = BAD_BEGINNINGS | NO_VERB if _is_action(node) else BAD_BEGINNINGS
        if words and words[0].lower().strip(",:;.") in bad:
            yield node.body[0].lineno, " ".join(words[:8])


def _is_action(node: ast.AST) -> bool:
    """Return True for a function that is not a property, a fixture or a test."""
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or node.name.startswith("test_"):
        return False
    return not any(re.search("property|fixture", ast.unparse(each)) for each in node.decorator_list)


def page_faults(text: str) -> Iterator[tuple[int, str]]:
    """Yield the line and the first words of each sentence that is too long."""
    prose = _FENCE.sub(lambda found: "\n" * found.group().count("\n"), text)
    prose = _LINK.sub("]", _NO_PROSE.sub("", prose))
    start = 0
    for end in [*(found.end() for found in _END.finditer(prose)), len(prose)]:
        words = prose[start:end].split()
        if len(words) > WORDS_PER_SENTENCE:
            yield prose.count("\n", 0, start) + 1, f"{len(words)} words: {' '.join(words[:8])}"
        start = end


def faults_of(path: Path) -> list[tuple[int, str]]:
    """Return the line and a description of each fault of a file."""
    text = path.read_text(encoding="utf-8")
    return list(docstring_faults(text) if path.suffix == ".py" else page_faults(text))


def files() -> Iterator[Path]:
    """Yield the files that are checked."""
    yield ROOT / "README.md"
    yield from sorted((ROOT / "docs").rglob("*.md"))
    for folder in FOLDERS:
        yield from sorted((ROOT / folder).rglob("*.py"))


def main() -> int:
    faults = [f"{path}:{line}: {why}" for path in map(Path, sys.argv[1:] or files()) for line, why in faults_of(path)]
    print("\n".join(faults) or "no faults")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
