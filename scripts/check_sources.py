"""Run the checks that read sources, in one process, because reading all syntax trees is most of their time.

python scripts/check_sources.py
"""

import gc
import importlib
import sys

CHECKS = ("check_english", "check_code_names", "list_modules --check", "list_reports --check", "count_house --check")


def status_of(check: str) -> int:
    sys.argv = check.split()
    return importlib.import_module(sys.argv[0]).main()


if __name__ == "__main__":
    gc.disable()  # collections would search millions of nodes of syntax trees, a quarter of the time
    sys.exit(max([status_of(check) for check in CHECKS]))
