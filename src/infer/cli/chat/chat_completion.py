"""Completions of the arguments of a chat's commands: files, models, parameters."""

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

from infer.cli.chat.chat_session import OFF, is_saved_chat
from infer.models.catalog.models_at_hand import models_at_hand
from infer.sampling_params import PARAMETER_NAMES


def complete_file(typed: str, is_meant: Callable[[Path], bool] = Path.is_file) -> Iterator[str]:
    """Yield the paths that begin with the typed text. Folders end in a slash.

    Hidden paths are included only if their dot was typed.
    """
    folder, slash, begin = typed.rpartition("/")
    try:
        found = sorted(Path(folder + slash or ".").expanduser().iterdir())
    except (OSError, RuntimeError, ValueError):
        return
    for path in found:
        if not path.name.startswith(begin) or (path.name.startswith(".") and not begin):
            continue
        if path.is_dir():
            yield f"{folder}{slash}{path.name}/"
        elif is_meant(path):
            yield folder + slash + path.name


def complete_saved_chat(typed: str) -> Iterator[str]:
    return complete_file(typed, is_saved_chat)


def complete_json(typed: str) -> Iterator[str]:
    return complete_file(typed, lambda path: path.suffix.lower() == ".json")


def complete_model(typed: str) -> Iterator[str]:
    """Yield the names of available models, or paths if no name matches."""
    names = [name for name in _model_names() if name.startswith(typed)]
    yield from names or complete_file(typed, lambda path: path.suffix == ".gguf")


def complete_parameter(typed: str) -> Iterator[str]:
    name, space, value = typed.partition(" ")
    if space:
        yield from (f"{name} {word}" for word in (OFF[1],) if word.startswith(value))
    else:
        yield from (f"{each} " for each in PARAMETER_NAMES if each.startswith(name))


def complete_system(typed: str) -> Iterator[str]:
    yield from (word for word in (OFF[0],) if word.startswith(typed))


@cache
def _model_names() -> list[str]:
    return [model.name for model in models_at_hand() if model.problem is None]
