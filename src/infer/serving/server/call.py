"""One HTTP request, from its first byte to the last byte of its answer, as the log and the metrics record it.

Another process can continue its stream. Tokens depend only on the prompt, the parameters, the seed and their positions.
So the events of a stream are equal byte by byte if its parts are divided as before. Only counts of cached tokens may
differ. A comment before the events of each part notes its tokens (`note_of`). The process that asks again sends all
these tokens with the request (`pack`). They are then given, not sampled, and cost as much as tokens of a prompt.
"""

import base64
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple, final

import msgspec
from starlette.datastructures import Headers
from starlette.requests import HTTPConnection

from infer.outputs import GenerationResult, Piece, TokenLogprob
from infer.serving.server.door import Entry

CALL = "infer.call"  # the key of a scope that has the call of its request
NO_ROUTE = "none"
# Headers of a request from the process that clients talk to: the name of the client's key, the call's id and its time,
# the number of bytes before the body that describe the part of the stream already sent, and the seconds that the
# request waited for its model to be loaded.
HANDED_HEADERS = ("x-infer-key-name", "x-infer-id", "x-infer-created", "x-infer-sent", "x-infer-load-seconds")
FINGERPRINT_HEADER = "x-infer-fingerprint"  # in an answer to that process: only the same model may continue it
NOTE = b": infer "
FAILED = b": infer-engine-failed\n\n"  # before the last event of a stream whose engine has failed
_END = b"\n\n"


class SentPart(NamedTuple):
    """A part of a stream that was sent. Parts are kept in the order in which they were sent.

    No tokens mean the end of the choice. `logprobs` has one entry per token, or is empty.
    """

    choice: int
    token_ids: list[int]
    logprobs: tuple[TokenLogprob, ...] = ()


_note_decoder = msgspec.msgpack.Decoder(SentPart)
_parts_decoder = msgspec.msgpack.Decoder(list[SentPart])


def note_of(choice: int, pieces: Sequence[Piece]) -> bytes:
    logprobs = tuple(piece.logprob for piece in pieces if piece.logprob is not None)
    part = SentPart(choice, [piece.token_id for piece in pieces], logprobs)
    return NOTE + base64.b64encode(msgspec.msgpack.encode(part)) + _END


def read_note(event: bytes) -> SentPart:
    return _note_decoder.decode(base64.b64decode(event[len(NOTE) :]))


def pack(parts: Sequence[SentPart]) -> bytes:
    return msgspec.msgpack.encode(parts)


def unpack(packed: bytes) -> list[SentPart]:
    return _parts_decoder.decode(packed)


def given_to(choice: int, parts: Sequence[SentPart]) -> tuple[list[int], list[TokenLogprob]]:
    """Return all tokens of a choice except the last one, and their log-probabilities.

    The last token is sampled again, because it may be the one that ends the answer.
    """
    own = [part for part in parts if part.choice == choice]
    token_ids = [token_id for part in own for token_id in part.token_ids]
    logprobs = [logprob for part in own for logprob in part.logprobs]
    return token_ids[:-1], logprobs[: max(0, len(token_ids) - 1)]


@final
@dataclass(eq=False)
class Call:
    """One HTTP request. `id` is the server's own; clients see it as `x-request-id` unless they sent one."""

    client_id: str | None  # the `x-request-id` that was sent
    method: str
    id: str = field(default_factory=lambda: f"req-{secrets.token_hex(12)}")
    route: str = NO_ROUTE  # the path in the table of routes
    received_at: float = field(default_factory=time.perf_counter)
    created: int = field(default_factory=lambda: int(time.time()))
    load_seconds: float = 0.0  # waited for the model, before `received_at`
    key_name: str = ""  # name of the API key
    operation: str = ""  # such as "chat"; "" for a request that does not use the model
    model: str = ""  # the name that the client used
    status: int = 0  # 0: the client disconnected before the answer's headers
    error_code: str = ""
    phase: str = "received"  # what is done for it now
    left_in: str = ""  # the phase in which the client disconnected
    warnings: list[str] = field(default_factory=list)  # about the request's body; the answer contains them
    streams: list[Any] = field(default_factory=list)  # `requests.stream.AsyncStream` of each answer in the queue
    sequences: list[Any] = field(default_factory=list)  # their `step.sequence.Sequence`
    is_forwarded: bool = False  # sent on to the engine's process, which counts and logs it
    is_probe: bool = False  # sent by the process that clients talk to: neither counted nor logged
    is_noted: bool = False  # its stream has notes, with which another process can continue it
    notes: list[bytes] = field(default_factory=list)  # notes of the parts whose events are sent next
    num_sent_bytes: int = 0  # bytes before the body that describe `sent`
    sent: Sequence[SentPart] = ()  # parts of the stream, sent by a process that died
    entry: Entry | None = None  # the place that the door gave it

    @property
    def seconds(self) -> float:
        """Seconds since the server received the request, including its wait for the model to be loaded."""
        return self.load_seconds + time.perf_counter() - self.received_at

    @cached_property
    def results(self) -> list[GenerationResult]:
        """The results of the answers, including cancelled ones. Read it only after the call has ended."""
        return [sequence.result() for sequence in self.sequences]

    def add(self, stream: Any) -> None:
        """Note one more answer, which is now in the queue."""
        self.streams.append(stream)
        self.sequences.append(stream.sequence)
        self.phase = "answering"
        if self.entry is not None:
            self.entry.num_submitted += 1

    def handed_on(self, num_sent_bytes: int, load_seconds: float) -> list[tuple[bytes, bytes]]:
        """Return the headers by which another process takes this call over."""
        values = self.key_name, self.id, self.created, num_sent_bytes, f"{load_seconds:.6f}"
        return [(name.encode(), str(value).encode()) for name, value in zip(HANDED_HEADERS, values, strict=True)]

    def take_over(self, headers: Headers) -> None:
        """Set the fields that are `handed_on`. A readiness probe, which clients do not send, has no id."""
        self.key_name, call_id, created, sent, load_seconds = (headers.get(name, "") for name in HANDED_HEADERS)
        if call_id:
            self.id, self.created, self.num_sent_bytes, self.is_noted = call_id, int(created), int(sent), True
            self.load_seconds = float(load_seconds or 0.0)
        else:
            self.is_probe = True

    def leave(self) -> None:
        """Note the phase in which the client disconnected."""
        self.left_in = self.phase

    def cancel(self) -> None:
        """Cancel all answers of the call."""
        for stream in self.streams:
            stream.cancel()

    def cancel_waiting(self) -> None:
        """Cancel the answers of the call that have not begun."""
        for stream, sequence in zip(self.streams, self.sequences, strict=True):
            if not (sequence.has_slot or sequence.pieces):
                stream.cancel()


def call_of(connection: HTTPConnection) -> Call:
    """Return the call of a request that goes through the server's app."""
    call: Call = connection.scope[CALL]
    return call
