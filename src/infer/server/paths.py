"""The paths that clients use, matched to the table of routes, and the message for a path that no route has."""

import difflib
import re
from collections.abc import Iterable

# The first word of other servers' paths, and what to use here.
_ELSEWHERE = {
    "api": "of Ollama's API, GET /docs lists what there is",
    "slots": "use /v1/engine/events",
    "version": "use /props",
    "ping": "use /health",
    "audio": "only text is served",
    "images": "only text is served",
    "files": "files are not kept: use `infer batch`",
    "batches": "batches are not kept: use `infer batch`",
    "generate": "use /v1/completions",
    "invocations": "use /v1/chat/completions",
}


def known_path(path: str, patterns: Iterable[re.Pattern[str]]) -> str:
    """Return the path of a route that this path means, or the path itself.

    Paths may be without /v1, with /openai before them, or with a slash at their end, because many base URLs cause them.
    """
    path = path.replace("\n", "%0A")  # `$` of a route's pattern stands before a newline, too
    return next((each for each in _candidates(path) if any(known.match(each) for known in patterns)), path)


def no_route(method: str, path: str, known: Iterable[str]) -> str:
    """Return the message for a path that no route has: the nearest path, or what to use instead."""
    steps = [each for each in path.split("/") if each and each != "v1"]
    message = f"there is no {method} {path:.200} here"
    if steps and (instead := _ELSEWHERE.get(steps[0])):
        return f"{message}: {instead}"
    near = difflib.get_close_matches(path[:200], list(known), n=1, cutoff=0.6)
    return f"{message}: did you mean {near[0]}?" if near else f"{message}: GET /docs lists the routes"


def _candidates(path: str) -> list[str]:
    if path.startswith("/page/"):
        return [path]
    plain = re.sub("/{2,}", "/", path).rstrip("/") or "/"
    plain = plain.removeprefix("/openai") or "/"
    found = [plain, f"/v1{plain}", plain.removeprefix("/v1"), plain.replace("/v1/v1/", "/v1/", 1)]
    return [each for each in found if each != "/" or path == "/"]
