"""The command of a script that writes a page, or with --check fails if the page is not up to date."""

import argparse
import sys
from pathlib import Path


def write_or_check(description: str | None, page: Path, content: str) -> int:
    """Read the command line, write the page or compare it, and return the exit status."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing, fail if the page is not up to date")
    if not parser.parse_args().check:
        page.write_text(content, encoding="utf-8")
    elif content != page.read_text(encoding="utf-8"):
        print(f"{page.name} is not up to date: run python scripts/{Path(sys.argv[0]).stem}.py")
        return 1
    return 0
