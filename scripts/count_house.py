"""Count what the project consists of, and compare the numbers with their limits in tests/data/house.toml.

    python scripts/count_house.py                  print each number with its limit and its goal
    python scripts/count_house.py --commit C       print the numbers of another commit
    python scripts/count_house.py --check          fail if a number is beyond its limit, or its limit is too loose
    python scripts/count_house.py --lower          lower the limits to the numbers; no limit is ever loosened
    python scripts/count_house.py --set "NAME" …   set these limits, or all: only for the allowance of an issue

With --flow, the files and functions of infer that a request passes are counted instead (half a minute). A line of code
is a line with a token that is neither a comment nor part of a docstring. Lines of a file and of a function include all
that is between its first and its last.
"""

import argparse
import gc
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path

from house.flow import count_flow
from house.limits import LIMITS, Limit, problems, read_limits, with_set, with_tightened
from house.sizes import count, totals

ROOT = Path(__file__).parents[1]


@contextmanager
def tree_of(commit: str) -> Iterator[Path]:
    """Yield a temporary folder with the files of a commit. Raises CalledProcessError if git does not have it."""
    archive = subprocess.run(["git", "archive", commit], cwd=ROOT, capture_output=True, check=True).stdout
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(["tar", "--extract", "--directory", folder], input=archive, check=True)
        yield Path(folder)


def table(numbers: Mapping[str, int], limits: Mapping[str, Limit]) -> Iterator[str]:
    """Yield a line per number, in the order of the limits."""
    yield f"{'':42}{'now':>9}{'limit':>9}{'goal':>9}"
    for name in [*(name for name in limits if name in numbers), *(numbers.keys() - limits.keys())]:
        limit = limits.get(name)
        columns = [numbers[name], limit and limit.limit, limit and limit.goal]
        yield f"{name:42}" + "".join(f"{'' if column is None else format(column, ','):>9}" for column in columns)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--flow", action="store_true", help="count the files and functions that a request passes")
    action = parser.add_mutually_exclusive_group()
    action.add_argument("--commit", metavar="C", help="count another commit")
    action.add_argument("--check", action="store_true", help="fail if a number and its limit do not fit")
    action.add_argument("--lower", action="store_true", help="lower the limits to the numbers")
    action.add_argument("--set", nargs="*", metavar="NAME", help="set limits to the numbers: for allowances only")
    return parser.parse_args()


def main() -> int:
    options = parse_options()
    try:
        with tree_of(options.commit) if options.commit else nullcontext(ROOT) as root:
            numbers = count_flow(root / "src") if options.flow else totals(count(root))
    except subprocess.CalledProcessError as error:
        sys.exit(error.stderr.decode().strip())
    file = ROOT / LIMITS
    text = file.read_text(encoding="utf-8")
    limits = read_limits(text, flow=options.flow)
    if options.lower:
        file.write_text(with_tightened(text, numbers), encoding="utf-8")
    elif options.set is not None:
        try:
            file.write_text(with_set(text, numbers, options.set), encoding="utf-8")
        except ValueError as error:
            sys.exit(str(error))
    elif options.check:
        lines = list(problems(numbers, limits).values())
        print("\n".join(lines) or f"{len(numbers)} numbers keep their limits")
        return bool(lines)
    else:
        print("\n".join(table(numbers, limits)))
    return 0


if __name__ == "__main__":
    gc.disable()  # collections would search millions of nodes of syntax trees, a quarter of the time
    sys.exit(main())
