"""The extent of tests with very many cases: they run a part of the cases, or with INFER_TESTS=all each one."""

import os

IS_WHOLE = os.environ.get("INFER_TESTS") == "all"


def usual_or_all(usual: int, whole: int) -> int:
    return whole if IS_WHOLE else usual
