"""Compare the public surface with tests/data/surface.json, which tests/project/test_surface.py guards.

    python scripts/list_surface.py            print the rows that are new, changed or gone
    python scripts/list_surface.py --write    write them into the file
    python scripts/list_surface.py --print    print all rows of the code

A row is a public name with its promise: a type, a default, a kind. If the code no longer has a row, the file keeps it
under `removed`, and CHANGELOG.md must name it under a heading `### Removed`. So no row is removed by this script alone.
"""

import argparse
import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from surface.commands import alias_rows, chat_rows, command_rows
from surface.python_names import python_rows
from surface.routes import chunk_rows, engine_event_rows, foreign_rows, metric_rows, route_rows
from surface.scanned import (
    error_rows,
    event_rows,
    exit_rows,
    extra_rows,
    model_rows,
    module_trees,
    package_rows,
    text_rows,
    variable_rows,
)

Rows = dict[str, str]
ROOT = Path(__file__).parents[1]
FILE, CHANGELOG = ROOT / "tests" / "data" / "surface.json", ROOT / "CHANGELOG.md"
COMMAND = ".venv/bin/python scripts/list_surface.py --write"
REMOVED = "removed"
_REMOVED_GROUP = re.compile(r"^### Removed\n(.*?)(?=^## |^### |\Z)", re.MULTILINE | re.DOTALL)


def found_surface() -> dict[str, Rows]:
    """Return the rows that the code has now, by their section."""
    trees = list(module_trees())
    sections: dict[str, Iterable[tuple[str, str]]] = {
        "python": python_rows(),
        "commands": command_rows(),
        "commands of a chat": chat_rows(),
        "options of other programs": alias_rows(),
        "routes": route_rows(),
        "chunks of streams": chunk_rows(),
        "events of streams": event_rows(trees),
        "events of the engine": engine_event_rows(),
        "fields of other servers": foreign_rows(),
        "metrics": metric_rows(),
        "environment variables": variable_rows(trees),
        "exit statuses": exit_rows(),
        "error codes": error_rows(trees),
        "extras": extra_rows(),
        "models": model_rows(),
        "package": package_rows(),
        "headers and logs": text_rows(),
    }
    return {section: _unique(section, rows) for section, rows in sections.items()}


def _unique(section: str, rows: Iterable[tuple[str, str]]) -> Rows:
    found: Rows = {}
    for name, promise in rows:
        if found.setdefault(name, promise) != promise:
            raise ValueError(f"{section}: two rows are named {name!r}: {found[name]!r} and {promise!r}")
    return found


def differences(stored: Mapping[str, Any], found: Mapping[str, Rows]) -> list[str]:
    """Return a line per row that is new (+), gone (-) or promises something else (-, +) than the file says."""
    lines = []
    for section in sorted((stored.keys() | found.keys()) - {REMOVED}):
        before, now = stored.get(section, {}), found.get(section, {})
        for name in sorted(before.keys() | now.keys()):
            if before.get(name) != now.get(name):
                lines += [f"- {section}: {name}: {before[name]}"] if name in before else []
                lines += [f"+ {section}: {name}: {now[name]}"] if name in now else []
    return lines


def updated(stored: Mapping[str, Any], found: Mapping[str, Rows]) -> dict[str, Any]:
    """Return the file's new content: the rows found, and under `removed` all rows that the file ever had besides."""
    former = {section: dict(rows) for section, rows in stored.get(REMOVED, {}).items()}
    for section, rows in stored.items():
        if section != REMOVED:
            former[section] = former.get(section, {}) | rows
    gone = {
        section: {name: promise for name, promise in rows.items() if name not in found.get(section, {})}
        for section, rows in former.items()
    }
    return {**found, REMOVED: {section: rows for section, rows in gone.items() if rows}}


def unannounced(stored: Mapping[str, Any], changelog: str) -> list[str]:
    """Return the removed rows that no group `### Removed` of the changelog names.

    A removed name also covers the removed rows that begin with it, such as the arguments of a method.
    """
    named = {name for group in _REMOVED_GROUP.findall(changelog) for name in re.findall(r"`([^`]+)`", group)}
    return [
        f"{section}: {row}"
        for section, rows in stored.get(REMOVED, {}).items()
        for row in rows
        if not any(name in rows and (row == name or re.match(rf"{re.escape(name)}[^\w-]", row)) for name in named)
    ]


def as_text(surface: Mapping[str, Any]) -> str:
    """Return the file's text: one row per line, in alphabetical order."""
    return json.dumps(surface, ensure_ascii=False, indent=1, sort_keys=True) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write the rows into the file")
    parser.add_argument("--print", action="store_true", help="print all rows of the code as JSON")
    arguments = parser.parse_args()
    stored = json.loads(FILE.read_text(encoding="utf-8")) if FILE.exists() else {}
    found = found_surface()
    if arguments.print:
        print(as_text(found))
        return 0
    for line in differences(stored, found):
        print(line)
    if arguments.write:
        stored = updated(stored, found)
        FILE.write_text(as_text(stored), encoding="utf-8")
    missing = unannounced(stored, CHANGELOG.read_text(encoding="utf-8"))
    for row in missing:
        print(f"CHANGELOG.md must name under ### Removed: {row}")
    return 1 if missing or differences(stored, found) else 0


if __name__ == "__main__":
    raise SystemExit(main())
