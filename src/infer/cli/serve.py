"""`infer serve`: the server of a model. Nothing here loads torch: the thread that loads the model does."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import infer
from infer.server.loading import OnProgress
from infer.server.process import bind, run_server
from infer.server.settings import ServerSettings
from infer.server.state import ServerState
from infer.system.status_line import write_notice

Load = Callable[[OnProgress], "infer.LLM"]


def run_serve(options: Mapping[str, Any], load: Load) -> int:
    """The exit status."""
    names = ("model", "host", "port", "slots")
    settings = ServerSettings(**{name: options[name] for name in names})
    listener = bind(settings)
    return run_server(ServerState(settings), listener, partial(_load, load), _announce)


def _load(load: Load, on_progress: OnProgress) -> "infer.AsyncLLM":
    llm = load(on_progress)
    return infer.AsyncLLM(llm)


def _announce(state: ServerState) -> None:
    write_notice(f"{state.settings.model} is served at http://{state.settings.host}:{state.settings.port}")
