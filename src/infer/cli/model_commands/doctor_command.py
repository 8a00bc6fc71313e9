"""`infer doctor`: report the faults of a model's files, one line each, or as one JSON object."""

import json
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from infer.cli.model_commands.doctor_page import doctor_page
from infer.cli.model_commands.page_file import write_page
from infer.cli.terminal.signals import exit_on_signal
from infer.cli.terminal.terminal import Spinner, TextWriter
from infer.models.catalog.doctor import Diagnosis, examine

_MAX_LINES = 20  # shown per kind of finding


def run_doctor(model: str, *, as_json: bool, html: Path | None = None) -> int:
    """Write the findings, and a page to `html`. Return the exit status: 1 if there are findings."""
    with exit_on_signal(), Spinner("reading") as spinner:
        found = examine(model, spinner.progress)
    if html is not None:
        write_page(html, doctor_page(found))
    text = json.dumps(found.to_json(), ensure_ascii=False) if as_json else "\n".join(lines(found))
    TextWriter(sys.stdout).write(f"{text}\n")
    return 1 if found.findings else 0


def lines(found: Diagnosis) -> Iterator[str]:
    """Yield one line per finding, at most twenty of one kind, and then the tensors to quantise again."""
    if not found.findings:
        yield f"no faults found in {found.num_tensors:,} tensors and {found.num_tokens:,} tokens"
        return
    counts = Counter[str]()
    for finding in found.findings:
        counts[finding.kind] += 1
        if counts[finding.kind] <= _MAX_LINES:
            yield str(finding)
    for kind, count in counts.items():
        if count > _MAX_LINES:
            yield f"and {count - _MAX_LINES:,} more of this kind: {kind} (--json lists all)"
    if names := found.requantise:
        more = f" and {len(names) - _MAX_LINES:,} more" if len(names) > _MAX_LINES else ""
        yield f"quantise again: {', '.join(names[:_MAX_LINES])}{more}"
