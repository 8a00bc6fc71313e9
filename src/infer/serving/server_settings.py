"""The settings of a server, declared once for the server, its child processes and the options of `infer serve`.

This module loads neither torch nor the packages of the extra `serve`, because help shows the options.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Self, final

from infer.compute.operands.limits import GPU_STEP, HOST_STEP
from infer.engine.step.scheduler import GAP_SECONDS
from infer.errors import InvalidRequestError
from infer.parameters import ANY, Number, Size, Whole, parameter

UnknownFields = Literal["warn", "refuse", "ignore"]
AgentPrompts = Literal["adapt", "keep"]
MetricsNames = Literal["infer", "vllm"]
_COUNT, _SECONDS = Whole(1), Number(0.1)


@final
@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """Settings of a server. Times are in seconds unless a name says otherwise. The command checks their ranges.

    `model` is the name that clients see; `aliases` are further names. `model_path` is the value of `--model`. The
    settings with an option are in the order of the command's help.
    """

    model: str = "smollm2"
    aliases: tuple[str, ...] = ()
    model_path: str = ""
    port: int = 8000
    api_keys: Mapping[str, str] = field(default_factory=dict)  # key → its name, for the log and as the tenant
    max_slots: int = HOST_STEP.logits  # that the device allows
    max_header_bytes: int = 16 * 2**10
    max_headers: int = 100
    max_unsent_bytes: int = 2**20  # a stream with more unsent bytes waits for its reader
    stall_seconds: float = 5.0  # within which this reader must take some of these bytes, or the stream is ended
    comment_seconds: float = 10.0  # of silence in a stream, after which a comment keeps it open
    is_child: bool = False  # a child of the process that talks to clients, `distributed.front`

    # fmt: off
    memory: int | None = parameter(
        None, Size(), "Memory for all models together, such as 12GB; the least recently used ones are unloaded for "
        "others.  [default: 9/10 of the available memory]", group="memory", metavar="SIZE")
    idle_unload: float | None = parameter(
        None, _SECONDS, "Unload a model that has been idle for this time.", group="idle", metavar="SECONDS")
    host: str = parameter("127.0.0.1", ANY, "Address to listen at.", group="address")
    allow_embeddings: bool = parameter(
        False, ANY, "Answer /v1/embeddings also with an untrained model.", flags=("--embeddings",), group="allowed")
    allow_pull: bool = parameter(
        False, ANY, "Let clients download models into the hub's local cache with /api/pull.", group="allowed")
    unknown_fields: UnknownFields = parameter(  # misspelt fields, and some that matter, are always refused
        "warn", ANY, "Policy for unknown fields of a request that resemble no known field.", group="clients")
    agent_prompts: AgentPrompts = parameter(
        "adapt", ANY, "Claude Code's prompts; adapt moves the parts that change to the end, for prefix reuse.",
        group="clients")
    metrics_names: MetricsNames = parameter(
        "infer", ANY, "Prefix of the names in /metrics; vllm suits dashboards and scalers that were made for vLLM.",
        group="clients")
    cors_origins: tuple[str, ...] = parameter(
        (), ANY, "Origin whose pages may call, such as https://example.org; * is all. Repeatable.",
        flags=("--cors-origin",), metavar="ORIGIN", group="clients")
    allowed_hosts: tuple[str, ...] = parameter(
        (), ANY, "Host name to serve besides local ones, on a loopback address without keys; * is all. Repeatable.",
        flags=("--allowed-host",), metavar="NAME", group="hosts")
    tls_cert: Path | None = parameter(None, ANY, "Certificate in PEM, to serve https.", metavar="FILE", group="hosts")
    tls_key: Path | None = parameter(None, ANY, "Private key of the certificate.", metavar="FILE", group="hosts")
    slots: int = parameter(
        16, Whole(1, GPU_STEP.logits),
        "Number of answers that are computed together, at most 64 on a CPU and 512 on a GPU.", group="slots")
    step_ms: float = parameter(
        1000 * GAP_SECONDS, Number(1),
        "Limit of 98 in 100 steps that read prompts while answers are streamed.", metavar="MILLISECONDS", group="waits")
    max_queue: int = parameter(
        512, _COUNT, "Number of answers of one key that may wait for a slot; others are refused.", group="waits")
    max_ttft: float = parameter(
        30.0, _SECONDS, "Longest wait for a first token; a request that would wait longer is refused.",
        metavar="SECONDS", group="waits")
    max_body_bytes: int = parameter(2 * 2**20, _COUNT, "Largest body of a request, in bytes.", group="limits")
    max_connections: int = parameter(1024, _COUNT, "Number of connections that may be open.", group="limits")
    header_seconds: float = parameter(10.0, _SECONDS, "Time for a request's headers.", group="limits")
    body_seconds: float = parameter(30.0, _SECONDS, "Time for a request's body.", group="limits")
    keep_alive_seconds: int = parameter(75, _COUNT, "Time after which an idle connection is closed.", group="limits")
    reader_seconds: float = parameter(60.0, _SECONDS, "Time for a slow reader to take the sent bytes.", group="limits")
    drain_seconds: float = parameter(30.0, Number(0), "Time for running answers after SIGTERM.", group="limits")
    watchdog_seconds: float = parameter(
        120.0, _SECONDS, "Time for a step; if a step takes longer, the process ends with status 3.", group="limits")
    # fmt: on

    @property
    def of_child(self) -> Self:
        """The settings of a process behind the one that talks to clients, which checks keys, origins and bodies."""
        none: dict[str, Any] = {"api_keys": {}, "cors_origins": (), "tls_cert": None, "tls_key": None}
        return replace(self, **none, is_child=True, max_body_bytes=1 << 60)


def read_keys(path: Path) -> dict[str, str]:
    """Return the names by key.

    A line is a key, or a name and a key; text after # is a comment. Raises InvalidRequestError.
    """
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "the file is not UTF-8"
        raise InvalidRequestError(f"the file {path} of API keys cannot be read: {reason}") from error
    names = dict[str, str]()
    for number, line in enumerate(lines, 1):
        match line.partition("#")[0].split():
            case []:
                continue
            case [key]:
                names[key] = f"key-{len(names) + 1}"
            case [name, key]:
                names[key] = name
            case _:
                raise InvalidRequestError(f"{path}, line {number}: a line must be a key, or a name and a key")
    if not names:
        raise InvalidRequestError(f"the file {path} contains no key: write one key per line")
    return names
