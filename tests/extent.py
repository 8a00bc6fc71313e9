"""How much is tried of what could be tried for ever: a part of it, or with INFER_TESTS=all the whole."""

import os

IS_WHOLE = os.environ.get("INFER_TESTS") == "all"


def usual_or_all(usual: int, whole: int) -> int:
    return whole if IS_WHOLE else usual
