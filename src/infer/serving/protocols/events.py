"""Parts that the answers of all protocols share: pieces of an answer as events, log-probabilities, and our own facts.

The encoder and openapi.json read the same Structs. The Structs of one protocol are in its own `events`.
"""

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Sequence
from typing import Annotated, Any, ClassVar, NamedTuple, Self, TypeVar, final

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

import infer
from infer.engine.requests.ask import Ask
from infer.outputs import FinishReason, GenerationResult, Piece, ReasoningDelta, TokenLogprob, ToolCall, ToolCallDelta
from infer.serving.protocols.api_errors import ApiError
from infer.serving.protocols.bodies import Served
from infer.serving.protocols.fields import Parameters

Json = dict[str, Any]
Count = Annotated[int, Meta(ge=0)]
Bytes = list[Annotated[int, Meta(ge=0, le=255)]]
StopReason = str | int | None
FINISH_REASONS = {"eos": "stop", "stop": "stop", "length": "length", "abort": "length"}  # aborted: its timeout expired
LEAST_LOGPROB = -9999.0  # of an impossible token: JSON has no infinity


class ChoiceFacts(Struct):
    """Our own facts about a choice: its seed, its stop reason and its times."""

    index: Count
    seed: int | None
    stop_reason: StopReason
    ttft_seconds: float | None
    decode_seconds: float | None
    decode_tokens_per_second: float | None


class Extension(Struct, kw_only=True):
    """The value of our own key `infer`. `warnings` are about the request's body."""

    choices: list[ChoiceFacts] | UnsetType = UNSET
    warnings: Sequence[str] | UnsetType = UNSET


class Output(Struct, kw_only=True):
    """An answer or a chunk of one. A Struct of an answer adds its fields before `infer`."""

    infer: Extension | UnsetType = UNSET


class ScoredToken(Struct):
    token: str
    logprob: float
    bytes: Bytes | None


class ScoredChoice(ScoredToken):
    top_logprobs: list[ScoredToken]


class Head(NamedTuple):
    """The fields that an answer and all its chunks begin with."""

    id: str
    created: int
    model: str
    system_fingerprint: str


def extension(results: Iterable[tuple[int, GenerationResult]]) -> Extension:
    """Return our own facts about the choices with these indices."""
    choices = list[ChoiceFacts]()
    for index, result in results:
        times = result.timing.ttft_s, result.timing.decode_time_s, result.timing.decode_tokens_per_second
        choices.append(ChoiceFacts(index, result.seed, result.stop_reason, *times))
    return Extension(choices=choices)


def call_values(call: ToolCall) -> Any:
    """Return the arguments of a call as an object in the model's own spelling, or {} if the call was cut off.

    Values would change its numbers: JSON has no limit of digits.
    """
    try:
        return msgspec.json.decode(call.arguments, type=msgspec.Raw)
    except (msgspec.DecodeError, RecursionError):
        return {}


@final
class Delta(NamedTuple):
    """The next pieces of the choice with index `choice`, or its end with the text and the reasoning held back."""

    choice: int
    pieces: Sequence[Piece]
    text: str
    reasoning: str
    calls: Sequence[ToolCallDelta]
    result: GenerationResult | None = None

    @classmethod
    def of(cls, choice: int, pieces: Sequence[Piece]) -> Self:
        text, reasoning, calls = "", "", list[ToolCallDelta]()
        for piece in pieces:
            text += piece.text
            for delta in piece.deltas:
                if isinstance(delta, ReasoningDelta):
                    reasoning += delta.text
                else:
                    calls.append(delta)
        return cls(choice, pieces, text, reasoning, calls)

    @property
    def token_ids(self) -> list[int]:
        return [piece.token_id for piece in self.pieces]

    @property
    def logprobs(self) -> list[TokenLogprob]:
        return [piece.logprob for piece in self.pieces if piece.logprob is not None]

    @property
    def finish_reason(self) -> FinishReason | None:
        """The finish reason of the choice if the last piece ended it."""
        return self.pieces[-1].finish_reason if self.pieces else None

    def token_columns(self, token_bytes: Sequence[bytes]) -> Json:
        """Return the ids, bytes and origins of the tokens, for clients that request token ids."""
        return {
            "token_ids": self.token_ids,
            "token_bytes": [list(token_bytes[piece.token_id]) for piece in self.pieces],
            "token_origins": [piece.origin for piece in self.pieces],
        }

    def fields(self) -> Json:
        """Return the reasoning and the calls as fields of OpenAI's delta, with one entry per call.

        A call has its id and name only in the chunk where it begins.
        """
        calls = dict[int, Json]()
        for delta in self.calls:
            call = calls.setdefault(delta.index, {"index": delta.index, "function": {"arguments": ""}})
            if delta.id is not None:
                call |= {"id": delta.id, "type": "function", "function": {"name": delta.name, "arguments": ""}}
            call["function"]["arguments"] += delta.arguments
        fields: Json = {"reasoning_content": self.reasoning} if self.reasoning else {}
        return fields | ({"tool_calls": list(calls.values())} if calls else {})


Scored = GenerationResult | Delta  # tokens with their log-probabilities, if these were requested


class Spelling(NamedTuple):
    """The texts of a vocabulary's tokens. Control tokens are not part of an answer's text."""

    token_bytes: Sequence[bytes]
    control_ids: Collection[int]

    @classmethod
    def of(cls, tokenizer: "infer.Tokenizer") -> Self:
        return cls(tokenizer.token_bytes, tokenizer.special_token_ids)

    def text(self, token_id: int) -> str:
        """Return a token's text. Incomplete characters are shown as bytes, as OpenAI does."""
        spelt = self.token_bytes[token_id]
        try:
            return spelt.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelt)

    def entry(self, token_id: int, logprob: float) -> Json:
        """Return a token's entry. The `bytes` of an answer's tokens, joined, are its text; a control token has none."""
        spelt = None if token_id in self.control_ids else list(self.token_bytes[token_id])
        return {"token": self.text(token_id), "logprob": max(logprob, LEAST_LOGPROB), "bytes": spelt}

    def chat_entries(self, scored: Scored) -> list[Json]:
        """Return `logprobs.content` of a chat completion."""
        return [
            self.entry(each.token_id, each.logprob) | {"top_logprobs": [self.entry(*top) for top in each.top]}
            for each in without_end(scored)
        ]

    def completion_columns(self, logprobs: Iterable[TokenLogprob | None]) -> dict[str, list[Any]]:
        """Return `logprobs` of a completion, without `text_offset`.

        None means a token that is not scored; its text is None as well.
        """
        columns: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": []}
        for each in logprobs:
            columns["tokens"].append(None if each is None else self.text(each.token_id))
            columns["token_logprobs"].append(None if each is None else max(each.logprob, LEAST_LOGPROB))
            columns["top_logprobs"].append(None if each is None else self._by_text(each))
        return columns

    def _by_text(self, each: TokenLogprob) -> dict[str, float]:
        """Return the log-probabilities of the alternatives and the token itself, by text.

        If several tokens have the same text, the likeliest one is returned.
        """
        likeliest = dict[str, float]()
        for token_id, logprob in sorted({*each.top, (each.token_id, each.logprob)}, key=lambda pair: -pair[1]):
            likeliest.setdefault(self.text(token_id), max(logprob, LEAST_LOGPROB))
        return likeliest

    def prompt_logprobs(self, logprobs: Iterable[TokenLogprob | None]) -> list[Json | None]:
        """Return a prompt's log-probabilities in vLLM's format: by token id, and null for the first token."""
        return [
            None
            if each is None
            else {
                str(token_id): {"logprob": logprob, "decoded_token": self.text(token_id)}
                for token_id, logprob in (*each.top, (each.token_id, each.logprob))
            }
            for each in logprobs
        ]


def without_end(scored: Scored) -> Sequence[TokenLogprob]:
    """Return the log-probabilities without the token that ends the answer, which is not a part of its text."""
    logprobs = scored.logprobs or ()
    return logprobs[:-1] if scored.finish_reason == "eos" else logprobs


Chunk = Struct | Json  # the `type` of a dict is also the name of its event
_Answer = TypeVar("_Answer")
EVENTS, LINES = "text/event-stream", "application/x-ndjson"
Scores = Sequence[TokenLogprob | None]  # one entry per token of a prompt
DONE = b"data: [DONE]\n\n"
_LINE_ENDS = {each.encode(): b"\\u%04x" % ord(each) for each in "\x85\u2028\u2029"}


@final
class Accepted(NamedTuple):
    """An ask whose prompts were read.

    `firsts` has the first `step.sequence.Sequence` of each prompt. `scores` has the scores of each prompt, for each
    number that `Shape.scored` returns.
    """

    served: Served
    ask: Ask
    firsts: Sequence[Any]
    scores: Sequence[Sequence[Scores]] = ()

    @property
    def prompt_ids(self) -> list[list[int]]:
        """The token ids of each prompt."""
        return [list(each.request.prompt_token_ids) for each in self.firsts]

    @property
    def spelling(self) -> Spelling:
        return Spelling.of(self.served.llm.tokenizer)

    def head(self, prefix: str) -> Head:
        """Return the fields that an answer begins with. Its id is the request's id, which also appears in the log."""
        served = self.served
        return Head(
            prefix + served.id.removeprefix("req-"), served.created, served.model, served.llm.system_fingerprint
        )


class ErrorShape:
    """The format of a protocol's errors and streams: OpenAI's, unless a protocol has its own.

    Streams have this media type, and `last` ends them.
    """

    error_type: type[ApiError] = ApiError
    media_type, last = EVENTS, DONE

    @classmethod
    def failure(cls, error: ApiError) -> bytes:
        """Return the last events of a stream that fails."""
        return event(cls.error_type.of(error).to_json(), cls.media_type) + cls.last


class Shape(ErrorShape, ABC):
    """A protocol: the Struct of its body, and the format of its answer and of its stream.

    `ask(served)` of a body returns what it asks, a function that makes this if texts must be encoded, or the answer
    itself if the model is not asked. `answer` is the type of a whole answer.
    """

    body: ClassVar[type[Parameters]]
    answer: ClassVar[Any]
    is_stream_by_default = False

    def __init__(self, accepted: Accepted, body: Any) -> None:
        """Begin the answer to a body. A shape that shows nothing of them needs no constructor."""

    @staticmethod
    def scored(body: Any) -> Sequence[int | None]:
        """Return for each scoring of the prompts the number of the likeliest tokens, or None to leave it out."""
        return ()

    @abstractmethod
    def whole(self, results: Sequence[GenerationResult]) -> Output | Sequence[Output]: ...

    @abstractmethod
    def chunks(self, part: Delta) -> Sequence[Chunk]:
        """Return the chunks of a part. They may depend on the parts before it."""

    def opening(self) -> Sequence[Chunk]:
        """Return the chunks that precede all generated parts."""
        return ()

    def closing(self, results: Sequence[GenerationResult]) -> Sequence[Chunk]:
        """Return the chunks that follow after all choices have ended."""
        return ()

    def fail(self, error: ApiError) -> bytes:
        """Return the last events of this stream after a failure."""
        return self.failure(error)


def with_warnings(answer: _Answer, warnings: Sequence[str]) -> _Answer:
    """Add the warnings about the body, if any, to an answer that can hold them, and return it."""
    if warnings and isinstance(answer, Output):
        answer.infer = Extension() if answer.infer is UNSET else answer.infer
        answer.infer.warnings = warnings
    return answer


def event(chunk: Chunk, media_type: str = EVENTS) -> bytes:
    """Return the bytes of a chunk in a stream of events or of lines of JSON.

    Some clients end a line at every character that Unicode calls a line's end (httpx's `iter_lines`, `str.splitlines`).
    Three of these characters are legal in JSON, so they are escaped.
    """
    line = msgspec.json.encode(chunk) + b"\n"
    for line_end, escaped in _LINE_ENDS.items():
        if line_end in line:
            line = line.replace(line_end, escaped)
    if media_type == LINES:
        return line
    name = chunk.get("type") if isinstance(chunk, dict) else None
    return (b"event: " + name.encode() + b"\n" if name else b"") + b"data: " + line + b"\n"
