"""Write docs/dev/field-reports.md from tests/data/field-reports.toml, and check the rows.

python scripts/list_reports.py            write the page
python scripts/list_reports.py --check    fail if a row breaks a rule, or if the page is not up to date
"""

import re
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from written_page import write_or_check

ROOT = Path(__file__).parents[1]
FILE = ROOT / "tests" / "data" / "field-reports.toml"
PAGE = ROOT / "docs" / "dev" / "field-reports.md"
AREAS = {
    "openai": "OpenAI's routes",
    "anthropic and ollama": "Anthropic's and Ollama's routes",
    "tool calls": "tool calls and reasoning",
    "templates": "chat templates",
    "tokenizers": "tokenizers and decoding",
    "schemas": "schemas, patterns and grammars",
    "files": "GGUF and safetensors of the wild",
    "embeddings": "embeddings and rerankers",
    "caches": "long contexts, caches and sessions",
    "running": "processes, signals, networks and systems",
}
VERDICTS = ("right", "mended", "refused", "other")
WITHOUT_CASE = {"source", "area", "about", "verdict", "reason"}
BEGINNING = """\
# Public bug reports, tried here

People who run models with other engines have found many faults, and written them down. Each row is such a report, tried
on this project. `tests/data/field-reports.toml` has the rows with their cases, and `scripts/list_reports.py` writes
this page.

To add one, write a row there: its source, an area, a sentence of your own, the verdict and a case. The head of the
file has the fields. `pytest tests/integration/test_field_reports.py` runs the cases. If the project is wrong, mend it
and its like first: the verdict is then "mended".

"""
HEADS = "| source | what it is about | verdict |\n|---|---|---|"


def faults_of(report: dict[str, Any]) -> Iterator[str]:
    """Yield what is wrong with a row."""
    name = ", ".join(report["source"])
    if not all(re.fullmatch(r"[\w.-]+/[\w.-]+#\d+", source) for source in report["source"]):
        yield f"{name}: a source is owner/name#number"
    if report["area"] not in AREAS or report["verdict"] not in VERDICTS:
        yield f"{name}: the area or the verdict is unknown"
    if report.keys() <= WITHOUT_CASE and report["verdict"] != "other":
        yield f"{name}: it has no case"
    if report["verdict"] in ("refused", "other") and not report.get("reason"):
        yield f"{name}: it has no reason"
    for test in report.get("tests", ()):
        path, _, function = test.partition("[")[0].rpartition("::")
        file = ROOT / path
        if not file.is_file() or f"def {function}(" not in file.read_text(encoding="utf-8"):
            yield f"{name}: there is no test {test}"


def page_of(reports: Sequence[dict[str, Any]]) -> str:
    """Return the page: counts by area, then a table for each area."""
    counts = Counter((report["area"], report["verdict"]) for report in reports)
    lines = [f"{BEGINNING}| area | {' | '.join(VERDICTS)} |", "|---" * 5 + "|"]
    for area, title in AREAS.items():
        lines.append(f"| {title} | {' | '.join(str(counts[area, each]) for each in VERDICTS)} |")
    for area, title in AREAS.items():
        lines += ["", f"## {title[0].upper()}{title[1:]}", "", HEADS]
        lines += [_line_of(report) for report in reports if report["area"] == area]
    return "\n".join(lines) + "\n"


def _line_of(report: dict[str, Any]) -> str:
    verdict = ": ".join(filter(None, (report["verdict"], report.get("reason"))))
    cells = (each.replace("|", "&#124;") for each in (", ".join(report["source"]), report["about"], verdict))
    return f"| {' | '.join(cells)} |"


def main() -> int:
    reports = tomllib.loads(FILE.read_text(encoding="utf-8"))["report"]
    faults = [fault for report in reports for fault in faults_of(report)]
    print("\n".join(faults) or f"{len(reports)} reports")
    return max(len(faults) > 0, write_or_check(__doc__, PAGE, page_of(reports)))


if __name__ == "__main__":
    sys.exit(main())
