"""The settings of a server, declared once for the server, its child processes and the options of `infer serve`.

This module loads neither torch nor the packages of the extra `serve`, because help shows the options.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, final

from infer.compute.operands.limits import GPU_STEP, HOST_STEP
from infer.engine.step.scheduler import GAP_SECONDS
from infer.parameters import ANY, Number, Whole, setting

UnknownFields = Literal["warn", "refuse", "ignore"]
AgentPrompts = Literal["adapt", "keep"]
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
    host: str = setting("127.0.0.1", ANY, "address", "Address to listen at.")
    allow_embeddings: bool = setting(
        False, ANY, "allowed", "Answer /v1/embeddings also with an untrained model.", flags=("--embeddings",))
    allow_pull: bool = setting(
        False, ANY, "allowed", "Let clients download models into the hub's local cache with /api/pull.")
    unknown_fields: UnknownFields = setting(  # misspelt fields, and some that matter, are always refused
        "warn", ANY, "clients", "Policy for unknown fields of a request that resemble no known field.")
    agent_prompts: AgentPrompts = setting(
        "adapt", ANY, "clients",
        "Claude Code's prompts; adapt moves the parts that change to the end, for prefix reuse.")
    cors_origins: tuple[str, ...] = setting(
        (), ANY, "clients", "Origin whose pages may call, such as https://example.org; * is all. Repeatable.",
        flags=("--cors-origin",), metavar="ORIGIN")
    allowed_hosts: tuple[str, ...] = setting(
        (), ANY, "hosts",
        "Host name to serve besides local ones, on a loopback address without keys; * is all. Repeatable.",
        flags=("--allowed-host",), metavar="NAME")
    tls_cert: Path | None = setting(None, ANY, "hosts", "Certificate in PEM, to serve https.", metavar="FILE")
    tls_key: Path | None = setting(None, ANY, "hosts", "Private key of the certificate.", metavar="FILE")
    slots: int = setting(
        16, Whole(1, GPU_STEP.logits), "slots",
        "Number of answers that are computed together, at most 64 on a CPU and 512 on a GPU.")
    step_ms: float = setting(
        1000 * GAP_SECONDS, Number(1), "waits",
        "Limit of 98 in 100 steps that read prompts while answers are streamed.", metavar="MILLISECONDS")
    max_queue: int = setting(
        512, _COUNT, "waits", "Number of answers of one key that may wait for a slot; others are refused.")
    max_ttft: float = setting(
        30.0, _SECONDS, "waits", "Longest wait for a first token; a request that would wait longer is refused.",
        metavar="SECONDS")
    max_body_bytes: int = setting(2 * 2**20, _COUNT, "limits", "Largest body of a request, in bytes.")
    max_connections: int = setting(1024, _COUNT, "limits", "Number of connections that may be open.")
    header_seconds: float = setting(10.0, _SECONDS, "limits", "Time for a request's headers.")
    body_seconds: float = setting(30.0, _SECONDS, "limits", "Time for a request's body.")
    keep_alive_seconds: int = setting(75, _COUNT, "limits", "Time after which an idle connection is closed.")
    reader_seconds: float = setting(60.0, _SECONDS, "limits", "Time for a slow reader to take the sent bytes.")
    drain_seconds: float = setting(30.0, Number(0), "limits", "Time for running answers after SIGTERM.")
    watchdog_seconds: float = setting(
        120.0, _SECONDS, "limits", "Time for a step; if a step takes longer, the process ends with status 3.")
    # fmt: on
