"""The history of messages typed in chats: one line of JSON per message, which only its owner can read."""

import json
import os
from contextlib import suppress
from pathlib import Path

from infer.system.atomic import replacing

MAX_MESSAGES = 1000
VARIABLE = "INFER_HISTORY"


def history_path() -> Path | None:
    """Return $INFER_HISTORY, else a file in the folder for programs' state.

    Return None if the variable is empty, which means to keep nothing, or if the home folder is unknown.
    """
    named, state = os.environ.get(VARIABLE), os.environ.get("XDG_STATE_HOME")
    if named == "":
        return None
    with suppress(RuntimeError):  # whose home is not known
        return Path(named or Path(state or "~/.local/state") / "infer" / "history").expanduser()
    return None


def read_history(path: Path) -> list[str]:
    """Return the last messages, oldest first. Other lines are left out; a file that cannot be read has no messages."""
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
    """Append a message immediately, so that a chat that is killed keeps it. Raises OSError."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(json.dumps(message).encode() + b"\n")
