"""The options of `infer serve`, `ray deploy`, `ps` and `stop`. Most are fields of `ServerSettings` of the same name."""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

import click

from infer.cli.options.command_options import DiskOption, ModelArgument, ModelOption, ServedOptions
from infer.cli.options.option_fields import ByteSize, Group, argument, option
from infer.compute.operands.limits import GPU_STEP
from infer.model_settings import ModelSettings

_SECONDS = click.FloatRange(min=0.1)
_COUNT = click.IntRange(min=1)
MAX_REPLICAS = 64


DEFAULT_MODEL = "smollm2"


# fmt: off
@dataclass(frozen=True)
class ClientOptions:
    """Options for the server's address, its clients, and the names of its model."""

    host: str = option(default="127.0.0.1", help="Address to listen at.")
    port: int | None = option(type=click.IntRange(0, 65535), help="Port; 0 is any free one.  [default: 8000]")
    served_names: tuple[str, ...] = option(
        "--served-model-name", metavar="NAME",
        help="Name of the model for clients. Repeatable: the others are aliases.  [default: --model]")
    allow_embeddings: bool = option("--embeddings", help="Answer /v1/embeddings also with an untrained model.")
    allow_pull: bool = option(help="Let clients download models into the hub's local cache with /api/pull.")
    api_key_file: Path | None = option(metavar="FILE",
                                       help="Require API keys: a file with a key, or a name and a key, per line.")
    unknown_fields: Literal["warn", "refuse", "ignore"] = option(
        default="warn", help="Policy for unknown fields of a request that resemble no known field.")
    agent_prompts: Literal["adapt", "keep"] = option(
        default="adapt",
        help="Claude Code's prompts; adapt moves the parts that change to the end, for prefix reuse.")
    cors_origins: tuple[str, ...] = option(
        "--cors-origin", metavar="ORIGIN",
        help="Origin whose pages may call, such as https://example.org; * is all. Repeatable.")


@dataclass(frozen=True)
class ProcessOptions:
    """Options for the server's host names, its certificate and its processes."""

    allowed_hosts: tuple[str, ...] = option(
        "--allowed-host", metavar="NAME",
        help="Host name to serve besides local ones, on a loopback address without keys; * is all. Repeatable.")
    tls_cert: Path | None = option(metavar="FILE", help="Certificate in PEM, to serve https.")
    tls_key: Path | None = option(metavar="FILE", help="Private key of the certificate.")
    ollama: bool = option(help="Listen at port 11434, where clients of Ollama expect it, unless --port is given.")
    isolate: bool = option(help="Run the model in a process of its own, which is restarted if it dies.")
    replicas: int = option(type=click.IntRange(1, MAX_REPLICAS), default=1,
                           help="Processes with the model, each with its own cores; if one dies, the others serve.")
    no_access_log: bool = option(help="Do not print one JSON line per request.")
    listen_fd: int | None = option(type=click.IntRange(min=0), hidden=True)  # the socket of a replica


@dataclass(frozen=True)
class SchedulingOptions:
    """Options for the amount of work in one step, and for the waits of requests."""

    slots: int = option(type=click.IntRange(1, GPU_STEP.logits), default=16,
                        help="Number of answers that are computed together, at most 64 on a CPU and 512 on a GPU.")
    pool: ClassVar = Group(ModelSettings, "pool")
    step_ms: float = option(type=click.FloatRange(min=1), default=38.0, metavar="MILLISECONDS",
                            help="Limit of 98 in 100 steps that read prompts while answers are streamed.")
    max_queue: int = option(type=_COUNT, default=512,
                            help="Number of answers of one key that may wait for a slot; others are refused.")
    max_ttft: float = option(type=_SECONDS, default=30.0, metavar="SECONDS",
                             help="Longest wait for a first token; a request that would wait longer is refused.")


@dataclass(frozen=True)
class LimitOptions:
    """Limits on the requests of a client, and on their time."""

    max_body_bytes: int = option(type=_COUNT, default=2 * 2**20, help="Largest body of a request, in bytes.")
    max_connections: int = option(type=_COUNT, default=1024, help="Number of connections that may be open.")
    header_seconds: float = option(type=_SECONDS, default=10.0, help="Time for a request's headers.")
    body_seconds: float = option(type=_SECONDS, default=30.0, help="Time for a request's body.")
    keep_alive_seconds: int = option(type=_COUNT, default=75, help="Time after which an idle connection is closed.")
    reader_seconds: float = option(type=_SECONDS, default=60.0, help="Time for a slow reader to take the sent bytes.")
    drain_seconds: float = option(type=click.FloatRange(min=0), default=30.0,
                                  help="Time for running answers after SIGTERM.")
    watchdog_seconds: float = option(
        type=_SECONDS, default=120.0,
        help="Time for a step; if a step takes longer, the process ends with status 3.")


@dataclass(frozen=True)
class ModelsOptions:
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
    memory: int | None = option(
        type=ByteSize(), metavar="SIZE",
        help="Memory for all models together, such as 12GB; the least recently used ones are unloaded for others.  "
             "[default: 9/10 of the available memory]")
    pinned: tuple[str, ...] = option("--pin", metavar="NAME",
                                     help="Model to load at the start and never unload. Repeatable.")
    idle_unload: float | None = option(type=_SECONDS, metavar="SECONDS",
                                       help="Unload a model that has been idle for this time.")
    served_as: str | None = option(hidden=True)  # the name of one model among several

    @property
    def model(self) -> str:
        """The only model, or the last one: a process of a server of several models gets its own model last."""
        return (self.named + self.models or (DEFAULT_MODEL,))[-1]


@dataclass(frozen=True)
class ServeOptions(
    ModelsOptions, ClientOptions, ProcessOptions, SchedulingOptions, LimitOptions, ServedOptions, DiskOption
):
    pass


@dataclass(frozen=True)
class DeployOptions(ModelArgument, ModelOption, ClientOptions, SchedulingOptions, ServedOptions):
    replicas: int = option(type=_COUNT, default=1, help="Number of engines, each with the model.")
    fronts: int = option(
        type=_COUNT, default=2,
        help="Number of processes that only forward requests; while one restarts, the others serve.")
    max_replicas: int | None = option(
        type=_COUNT,
        help="Largest number of engines; one is added while there are more requests than slots.")
    upscale_seconds: float = option(type=_SECONDS, default=10.0, metavar="SECONDS",
                                    help="Time with too many requests before an engine is added.")
    downscale_seconds: float = option(type=_SECONDS, default=300.0, metavar="SECONDS",
                                      help="Time with too few requests before an engine is removed.")
    drain_seconds: float = option(type=click.FloatRange(min=0), default=600.0,
                                  help="Time for the running answers of an engine or a front that is removed.")

@dataclass(frozen=True)
class RunningServerOptions:
    """The server that a command asks."""

    url: str = option(default="http://127.0.0.1:8000", envvar="INFER_URL", show_envvar=True, help="Server's URL.")
    api_key: str | None = option(envvar="INFER_API_KEY", show_envvar=True, metavar="KEY",
                                 help="API key, if the server has keys.")
    as_json: bool = option("--json", help="Print the server's answer as JSON.")
    verbose: bool = option("-v", "--verbose", help="Print a traceback with an error.")


@dataclass(frozen=True, kw_only=True)
class StopOptions(RunningServerOptions):
    model: str = argument()
# fmt: on


def serves_several(options: ServeOptions) -> bool:
    """Return True if each model has its own process, which may be unloaded."""
    asked = (options.models_dir, options.load_on_demand, options.memory, options.pinned, options.idle_unload)
    return len(options.models) > 1 or any(asked)
