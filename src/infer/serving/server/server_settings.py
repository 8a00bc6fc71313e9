"""The settings with which `infer serve` starts."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import final

from infer.compute.operands.limits import HOST_STEP
from infer.engine.step.scheduler import GAP_SECONDS
from infer.serving.protocols.agent_prompts import AgentPrompts
from infer.serving.protocols.unknown_fields import UnknownFields


@final
@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """Settings of a server. Times are in seconds unless a name says otherwise.

    `model` is the name that clients see; `aliases` are further names. `model_path` is the value of `--model`.
    If `cors_origins` is empty, no page of another origin may call. `max_queue` is the number of answers of one key that
    may wait for a slot.
    """

    model: str = "smollm2"
    aliases: tuple[str, ...] = ()
    model_path: str = ""
    slots: int = 16  # answers in one step
    max_slots: int = HOST_STEP.logits  # that the device allows
    host: str = "127.0.0.1"
    port: int = 8000
    tls_cert: Path | None = None
    tls_key: Path | None = None
    api_keys: Mapping[str, str] = field(default_factory=dict)  # key → its name, for the log and as the tenant
    cors_origins: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] = ()  # more than local names, on a loopback address without keys; "*": all
    max_queue: int = 512
    step_ms: float = 1000 * GAP_SECONDS  # limit of 98 in 100 steps that read prompts while answers are streamed
    max_ttft: float = 30.0  # seconds: a request with more work ahead of it is refused
    max_body_bytes: int = 2 * 2**20
    body_seconds: float = 30.0
    max_header_bytes: int = 16 * 2**10
    max_headers: int = 100
    header_seconds: float = 10.0
    max_connections: int = 1024
    keep_alive_seconds: int = 75
    max_unsent_bytes: int = 2**20  # a stream with more unsent bytes waits for its reader
    stall_seconds: float = 5.0  # within which this reader must take some of these bytes, or the stream is ended
    reader_seconds: float = 60.0  # within which a reader must take all unsent bytes
    comment_seconds: float = 10.0  # of silence in a stream, after which a comment keeps it open
    drain_seconds: float = 30.0
    watchdog_seconds: float = 120.0  # limit of one step
    allow_pull: bool = False  # clients may download models
    allow_embeddings: bool = False  # also from a model that was not made for them
    unknown_fields: UnknownFields = "warn"  # of a body; misspelt fields, and some that matter, are always refused
    agent_prompts: AgentPrompts = "adapt"  # drop or move the parts that change in every prompt of a coding agent
    is_child: bool = False  # a child of the process that talks to clients, `distributed.front`
