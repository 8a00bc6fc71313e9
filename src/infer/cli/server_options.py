"""The options of `infer serve`, `ray deploy`, `ps` and `stop`. `ServerSettings` and `ModelSettings` declare most."""

from pathlib import Path
from typing import ClassVar, Literal

import click

from infer.cli.command_options import AT_LEAST_1, DiskOption, ModelArgument, ModelOption, ServedOptions, VerboseOption
from infer.cli.option_fields import Declared, Group, argument, option, settings_field
from infer.model_settings import ModelSettings
from infer.serving.server_settings import ServerSettings

_SECONDS = click.FloatRange(min=0.1)
MAX_REPLICAS = 64
ClientName = Literal["claude", "codex", "opencode"]


DEFAULT_MODEL = "smollm2"


# fmt: off
class ClientOptions(Declared):
    """Options for the server's address, its clients, and the names of its model."""

    address: ClassVar = Group(ServerSettings, "address")
    port: int | None = option(type=click.IntRange(0, 65535), help="Port; 0 is any free one.  [default: 8000]")
    served_names: tuple[str, ...] = option(
        "--served-model-name", metavar="NAME",
        help="Name of the model for clients. Repeatable: the others are aliases.  [default: --model]")
    allowed: ClassVar = Group(ServerSettings, "allowed")
    api_key_file: Path | None = option(metavar="FILE",
                                       help="Require API keys: a file with a key, or a name and a key, per line.")
    clients: ClassVar = Group(ServerSettings, "clients")
    server: ServerSettings = settings_field(ServerSettings)


class ProcessOptions(Declared):
    """Options for the server's host names, its certificate and its processes."""

    hosts: ClassVar = Group(ServerSettings, "hosts")
    ollama: bool = option(help="Listen at port 11434, where clients of Ollama expect it, unless --port is given.")
    isolate: bool = option(help="Run the model in a process of its own, which is restarted if it dies.")
    replicas: int = option(type=click.IntRange(1, MAX_REPLICAS), default=1,
                           help="Processes with the model, each with its own cores; if one dies, the others serve.")
    no_access_log: bool = option(help="Do not print one JSON line per request.")
    listen_fd: int | None = option(type=click.IntRange(min=0), hidden=True)  # the socket of a replica


class SchedulingOptions(Declared):
    """Options for the amount of work in one step, and for the waits of requests."""

    slots: ClassVar = Group(ServerSettings, "slots")
    pool: ClassVar = Group(ModelSettings, "pool")
    waits: ClassVar = Group(ServerSettings, "waits")


class LimitOptions(Declared):
    """Limits on the requests of a client, and on their time."""

    limits: ClassVar = Group(ServerSettings, "limits")


class ModelsOptions(Declared):
    """Options for the models of a server.

    With several models, or with any of the last six options, each model has its own process.
    """

    named: tuple[str, ...] = argument(metavar="[MODEL]...", required=False)
    models: tuple[str, ...] = option(
        "-m", "--model", metavar="NAME|PATH", show_default=False,
        help="An installed model, a folder, a .gguf file, or org/repo[@revision][:Q4_K_M] on the hub. Repeatable.  "
             "[default: smollm2]")
    models_dir: Path | None = option(metavar="DIR", help="Serve the models in this folder, each loaded on demand.")
    load_on_demand: bool = option(help="Serve every model that `infer models` lists, each loaded on demand.")
    memory: ClassVar = Group(ServerSettings, "memory")
    pinned: tuple[str, ...] = option("--pin", metavar="NAME",
                                     help="Model to load at the start and never unload. Repeatable.")
    idle: ClassVar = Group(ServerSettings, "idle")
    served_as: str | None = option(hidden=True)  # the name of one model among several

    @property
    def model(self) -> str:
        """The only model, or the last one: a process of a server of several models gets its own model last."""
        return (self.named + self.models or (DEFAULT_MODEL,))[-1]


class ServeOptions(
    ModelsOptions, ClientOptions, ProcessOptions, SchedulingOptions, LimitOptions, ServedOptions, DiskOption
):
    """The options of `infer serve`."""

    @property
    def serves_several(self) -> bool:
        """True if each model has its own process, which may be unloaded."""
        of_all = (self.server.memory, self.server.idle_unload)
        return len(self.models) > 1 or any((self.models_dir, self.load_on_demand, self.pinned, *of_all))


class DeployOptions(ModelArgument, ModelOption, ClientOptions, SchedulingOptions, ServedOptions):
    replicas: int = option(type=AT_LEAST_1, default=1, help="Number of engines, each with the model.")
    fronts: int = option(
        type=AT_LEAST_1, default=2,
        help="Number of processes that only forward requests; while one restarts, the others serve.")
    max_replicas: int | None = option(
        type=AT_LEAST_1,
        help="Largest number of engines; one is added while there are more requests than slots.")
    upscale_seconds: float = option(type=_SECONDS, default=10.0, metavar="SECONDS",
                                    help="Time with too many requests before an engine is added.")
    downscale_seconds: float = option(type=_SECONDS, default=300.0, metavar="SECONDS",
                                      help="Time with too few requests before an engine is removed.")
    drain_seconds: float = option(type=click.FloatRange(min=0), default=600.0,
                                  help="Time for the running answers of an engine or a front that is removed.")


class ServerAddress(VerboseOption):
    """Options of a command that asks a running server."""

    url: str = option(default="http://127.0.0.1:8000", envvar="INFER_URL", show_envvar=True, help="Server's URL.")
    api_key: str | None = option(envvar="INFER_API_KEY", show_envvar=True, metavar="KEY",
                                 help="API key, if the server has keys.")


class LaunchOptions(ServerAddress):
    client: ClientName = argument()
    model: str | None = argument(metavar="[MODEL]", required=False)
    arguments: tuple[str, ...] = argument(metavar="[-- ARGUMENT...]", type=click.UNPROCESSED)


class RunningServerOptions(ServerAddress):
    """List the models of a running server: their state and their memory."""

    as_json: bool = option("--json", help="Print the server's answer as JSON.")


class StopOptions(RunningServerOptions):
    """Unload a MODEL of a running server of several models, after its current answers have ended."""

    model: str = argument()
# fmt: on
