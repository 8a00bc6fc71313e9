"""The options of `infer serve`, `ray deploy`, `ps` and `stop`. Most are fields of `ServerSettings` of the same name."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import click

from infer.cli.command_options import ByteSize, ModelArgument, ModelOption, PrefixOption, ServedOptions
from infer.cli.option_fields import argument, option
from infer.operands.limits import MAX_STEP_LOGITS

_SECONDS = click.FloatRange(min=0.1)
_COUNT = click.IntRange(min=1)
MAX_REPLICAS = 64


DEFAULT_MODEL = "smollm2"


# fmt: off
@dataclass(frozen=True)
class ClientOptions:
    """Options for who may send requests, to which address, and under which model name."""

    host: str = option(default="127.0.0.1", help="The address to listen at.")
    port: int | None = option(type=click.IntRange(0, 65535), help="0: a free one.  [default: 8000]")
    served_names: tuple[str, ...] = option(
        "--served-model-name", metavar="NAME",
        help="What clients call the model. Repeatable: others are aliases.  [default: that of --model]")
    allow_embeddings: bool = option("--embeddings", help="Answer /v1/embeddings with a model that is not made for it.")
    allow_pull: bool = option(help="Clients may download models into the hub's local cache: /api/pull.")
    api_key_file: Path | None = option(metavar="FILE",
                                       help="A key a line, or a name and a key: only who has one may ask.")
    unknown_fields: Literal["warn", "refuse", "ignore"] = option(
        default="warn", help="Fields of a request that are not known here, and near none that is.")
    agent_prompts: Literal["adapt", "keep"] = option(
        default="adapt",
        help="Claude Code's prompts: adapt moves what changes in each to the end, for prefix reuse.")
    cors_origins: tuple[str, ...] = option(
        "--cors-origin", metavar="ORIGIN",
        help="A page of this origin may call, such as https://example.org. Repeatable; * is all.")


@dataclass(frozen=True)
class ProcessOptions:
    """Options for the server's names, certificate and processes."""

    allowed_hosts: tuple[str, ...] = option(
        "--allowed-host", metavar="NAME",
        help="A name served beside local ones, without keys on a loopback address. Repeatable; * is all.")
    tls_cert: Path | None = option(metavar="FILE", help="A certificate: https.")
    tls_key: Path | None = option(metavar="FILE", help="Its private key.")
    ollama: bool = option(help="--port 11434, unless another one is given: where clients of Ollama look for it.")
    isolate: bool = option(help="The model in a process of its own, which is started again when it dies.")
    replicas: int = option(type=click.IntRange(1, MAX_REPLICAS), default=1,
                           help="Processes with the model, each on cores of its own: when one dies, others go on.")
    no_access_log: bool = option(help="No JSON line a request on stdout.")
    listen_fd: int | None = option(type=click.IntRange(min=0), hidden=True)  # of a replica: its socket


@dataclass(frozen=True)
class SchedulingOptions:
    """Options for how much is computed in one step, and for who has to wait."""

    slots: int = option(type=click.IntRange(1, MAX_STEP_LOGITS), default=16,
                        help="Answers that are computed in one step.")
    pool_pages: int | None = option(type=_COUNT,
                                    help="Pages of 64 tokens that all answers share.  [default: 8 full contexts']")
    step_ms: float = option(type=click.FloatRange(min=1), default=38.0, metavar="MILLISECONDS",
                            help="Of a step with prompts while answers are streamed: 98 of 100 take no longer.")
    max_queue: int = option(type=_COUNT, default=512,
                            help="Answers of one key that may wait for a slot; more are refused.")
    max_ttft: float = option(type=_SECONDS, default=30.0, metavar="SECONDS",
                             help="A request with more seconds of work ahead is refused.")


@dataclass(frozen=True)
class LimitOptions:
    """Limits of what a client may send, and of the time that it may take."""

    max_body_bytes: int = option(type=_COUNT, default=2 * 2**20, help="Of a request.")
    max_connections: int = option(type=_COUNT, default=1024, help="Open at once.")
    header_seconds: float = option(type=_SECONDS, default=10.0, help="For a request's head.")
    body_seconds: float = option(type=_SECONDS, default=30.0, help="For a request's body.")
    keep_alive_seconds: int = option(type=_COUNT, default=75, help="Of an idle connection.")
    reader_seconds: float = option(type=_SECONDS, default=60.0, help="For a slow reader to take what was sent.")
    drain_seconds: float = option(type=click.FloatRange(min=0), default=30.0,
                                  help="For answers under way, after SIGTERM.")
    watchdog_seconds: float = option(
        type=_SECONDS, default=120.0,
        help="For a step: one that takes longer hangs, and the process ends with status 3.")


@dataclass(frozen=True)
class ModelsOptions:
    """Options for the models of a server. With several, or with any of the last six, each has its own process."""

    named: tuple[str, ...] = argument(metavar="[MODEL]...", required=False)
    models: tuple[str, ...] = option(
        "-m", "--model", metavar="NAME|PATH", show_default=False,
        help="An installed model, a folder, a .gguf file, or org/repo[@revision][:Q4_K_M] on the hub. Repeatable.  "
             "[default: smollm2]")
    models_dir: Path | None = option(metavar="DIR", help="Serve the models in this folder, each loaded on demand.")
    load_on_demand: bool = option(help="Serve every model that `infer models` lists, each loaded on demand.")
    memory: int | None = option(
        type=ByteSize(), metavar="SIZE",
        help="What all models may take together, such as 12GB: the least recently used ones are unloaded for others.  "
             "[default: 9/10 of what is available]")
    pinned: tuple[str, ...] = option("--pin", metavar="NAME",
                                     help="A model that is loaded at the start and never unloaded. Repeatable.")
    idle_unload: float | None = option(type=_SECONDS, metavar="SECONDS",
                                       help="Unload a model that has answered nothing for so long.")
    served_as: str | None = option(hidden=True)  # of a model among several: its name

    @property
    def model(self) -> str:
        """The only model, or the last one: a process of a server of several is told its own after the others."""
        return (self.named + self.models or (DEFAULT_MODEL,))[-1]


@dataclass(frozen=True)
class ServeOptions(
    ModelsOptions, ClientOptions, ProcessOptions, SchedulingOptions, LimitOptions, ServedOptions, PrefixOption
):
    pass


@dataclass(frozen=True)
class DeployOptions(ModelArgument, ModelOption, ClientOptions, SchedulingOptions, ServedOptions):
    replicas: int = option(type=_COUNT, default=1, help="Engines, each with the model.")
    fronts: int = option(
        type=_COUNT, default=2,
        help="Processes without a model that pass requests on: while one is started again, others serve.")
    max_replicas: int | None = option(
        type=_COUNT,
        help="Engines are added up to so many while more requests go on than they have slots.")
    upscale_seconds: float = option(type=_SECONDS, default=10.0, metavar="SECONDS",
                                    help="Of too many requests, before an engine is added.")
    downscale_seconds: float = option(type=_SECONDS, default=300.0, metavar="SECONDS",
                                      help="Of too few, before one is taken away.")
    drain_seconds: float = option(type=click.FloatRange(min=0), default=600.0,
                                  help="At most, for answers under way of an engine or a front that is taken away.")

@dataclass(frozen=True)
class RunningServerOptions:
    """The server that a command asks."""

    url: str = option(default="http://127.0.0.1:8000", envvar="INFER_URL", show_envvar=True, help="The server.")
    api_key: str | None = option(envvar="INFER_API_KEY", show_envvar=True, metavar="KEY",
                                 help="A key of the server, if it has keys.")
    as_json: bool = option("--json", help="The server's answer as it is.")
    verbose: bool = option("-v", "--verbose", help="A traceback with an error.")


@dataclass(frozen=True, kw_only=True)
class StopOptions(RunningServerOptions):
    model: str = argument()
# fmt: on


def serves_several(options: ServeOptions) -> bool:
    """Return True if each model has a process of its own, which may be unloaded."""
    asked = (options.models_dir, options.load_on_demand, options.memory, options.pinned, options.idle_unload)
    return len(options.models) > 1 or any(asked)
