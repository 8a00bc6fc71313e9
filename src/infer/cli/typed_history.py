"""What was typed in chats, kept for the next one: a line of JSON for each message, for its owner's eyes alone."""

import json
import os
from contextlib import suppress
from pathlib import Path

from infer.system.atomic import replacing

MAX_MESSAGES = 1000
VARIABLE = "INFER_HISTORY"


def history_path() -> Path | None:
    """$INFER_HISTORY, of which an empty one keeps nothing; else in the folder for what programs remember."""
    named, state = os.environ.get(VARIABLE), os.environ.get("XDG_STATE_HOME")
    if named == "":
        return None
    with suppress(RuntimeError):  # whose home is not known
        return Path(named or Path(state or "~/.local/state") / "infer" / "history").expanduser()
    return None


def read_history(path: Path) -> list[str]:
    """The last messages, oldest first. What is no line of ours is left out; a file that cannot be read has none."""
    try:
        lines = path.read_bytes().splitlines()
    except (OSError, ValueError):
        return []
    messages = list[str]()
    for line in lines[-MAX_MESSAGES:]:
        with suppress(ValueError, RecursionError):
            if isinstance(message := json.loads(line), str):
                messages.append(message)
    if len(lines) > 2 * MAX_MESSAGES:
        with suppress(OSError), replacing(path) as file:
            file.write(b"\n".join(lines[-MAX_MESSAGES:]) + b"\n")
    return messages


def add_to_history(path: Path, message: str) -> None:
    """At once, so that a chat that is killed keeps it. Raises OSError."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(json.dumps(message).encode() + b"\n")
