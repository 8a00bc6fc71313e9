"""The paths that clients use, matched to the table of routes, and the message for a path without a route."""

import difflib
import re
from collections.abc import Iterable

# What to use instead, by the first word of the paths of other servers.
_ELSEWHERE = {
    "api": "only a part of Ollama's API is served, GET /docs lists the routes",
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

    A path may lack /v1, begin with /openai, or end with a slash, because clients combine it with many base URLs.
    """
    path = path.replace("\n", "%0A")  # `$` in a route's pattern also matches before a newline
    return next((each for each in _candidates(path) if any(known.match(each) for known in patterns)), path)


def no_route(method: str, path: str, known: Iterable[str]) -> str:
    """Return the message for a path without a route. It names the nearest path, or what to use instead."""
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
