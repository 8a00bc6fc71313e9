"""Compute the answers of tests/helpers/answer_cases.py and store them in tests/data/answers.json.

    python scripts/store_answers.py                         add the rows of new requests
    python scripts/store_answers.py --change 'llama: chat'  also replace these rows, or remove them without a request
    python scripts/store_answers.py --change all            replace every row that differs

If another stored row differs, nothing is written: the script prints the differences, and its exit status is 1. A
commit that changes rows says in its body why their bits change.
"""

import argparse
import sys
import tempfile
from collections.abc import Collection
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "tests" / "helpers"))

from answer_cases import CASES
from answer_runs import Row, answers_in, differences, read_stored, write_stored


def all_rows() -> dict[str, Row]:
    """Return the answer of each case, by its name."""
    with tempfile.TemporaryDirectory() as folder, answers_in(Path(folder)) as answers:
        return {case.name: answers.of(case) for case in CASES}


def refused(stored: dict[str, Row], rows: dict[str, Row], changed: Collection[str]) -> list[str]:
    """Return a line for each stored row that would change or go, and that `changed` does not name."""
    lines = []
    for name, row in stored.items():
        if name in changed or "all" in changed:
            continue
        found = differences(row, rows[name]) if name in rows else ["no request has this name"]
        lines += [f"{name}: {'; '.join(found)}"] if found else []
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--change", nargs="+", metavar="NAME", default=[], help="rows that may change, or all")
    changed = parser.parse_args().change
    stored = read_stored()
    unknown = [name for name in changed if name not in (*stored, *(case.name for case in CASES), "all")]
    if unknown:
        parser.error(f"--change must name rows of the file, got {unknown[0]!r}: use one of {', '.join(stored)}")
    rows = all_rows()
    lines = refused(stored, rows, changed)
    if lines:
        print(*lines, "Nothing is written. Name the rows that change on purpose: --change NAME", sep="\n")
        return 1
    write_stored(rows)
    print(f"{len(rows)} rows, {len(rows.keys() - stored.keys())} of them new")
    return 0


if __name__ == "__main__":
    sys.exit(main())
