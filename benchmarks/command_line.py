"""What the scripts' command lines have in common."""

import argparse
import os
import sys
from pathlib import Path

REPORTS = Path(__file__).with_name("reports")


def available_cores() -> int:
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def make_parser(
    doc: str | None, *, model: str | None = None, threads: bool = False, rounds: int | None = None
) -> argparse.ArgumentParser:
    """With a script's docstring as its help, and the options that have a default here; `threads` are all cores."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    if model is not None:
        parser.add_argument("--model", default=model)
    if threads:
        parser.add_argument("--threads", type=int, default=available_cores())
    if rounds is not None:
        parser.add_argument("--rounds", type=int, default=rounds)
    return parser
