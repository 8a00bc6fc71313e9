"""The error of whatever is asked of a model, or a session, that is closed."""

from infer.errors import ClosedError


def closed(what: str = "model") -> ClosedError:
    """Return the error that says so, with what to do instead."""
    instead = "load it again, with LLM(...)" if what == "model" else "begin another one"
    return ClosedError(f"the {what} is closed: {instead}")
