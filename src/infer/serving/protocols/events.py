"""The pieces of answers as events: what a protocol makes of a `Delta`, and the bytes of an event."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple, Self, TypeVar, final

import msgspec
from msgspec import UNSET, Struct

from infer.engine.requests.ask import Ask
from infer.outputs import FinishReason, GenerationResult, Piece, ReasoningDelta, TokenLogprob, ToolCallDelta
from infer.serving.protocols.answers import Extension, Head, Json, Output
from infer.serving.protocols.api_errors import ApiError
from infer.serving.protocols.bodies import Served
from infer.serving.protocols.fields import Complete, as_given

Chunk = Struct | Json  # the `type` of a dict is also the name of its event
_Answer = TypeVar("_Answer")
EVENTS, LINES = "text/event-stream", "application/x-ndjson"
Scores = Sequence[TokenLogprob | None]  # one entry per token of a prompt
DONE = b"data: [DONE]\n\n"
_LINE_ENDS = {each.encode(): b"\\u%04x" % ord(each) for each in "\x85\u2028\u2029"}


@final
class Delta(NamedTuple):
    """The next pieces of the choice with index `choice`, or its end with the text and the reasoning held back."""

    choice: int
    pieces: Sequence[Piece]
    text: str
    deltas: Sequence[ReasoningDelta | ToolCallDelta]
    result: GenerationResult | None = None

    @classmethod
    def of(cls, choice: int, pieces: Sequence[Piece]) -> Self:
        text, deltas = "", list[ReasoningDelta | ToolCallDelta]()
        for piece in pieces:
            text += piece.text
            deltas += piece.deltas
        return cls(choice, pieces, text, deltas)

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
        reasoning, calls = "", dict[int, Json]()
        for delta in self.deltas:
            if isinstance(delta, ReasoningDelta):
                reasoning += delta.text
                continue
            call = calls.setdefault(delta.index, {"index": delta.index, "function": {"arguments": ""}})
            if delta.id is not None:
                call |= {"id": delta.id, "type": "function", "function": {"name": delta.name, "arguments": ""}}
            call["function"]["arguments"] += delta.arguments
        fields: Json = {"reasoning_content": reasoning} if reasoning else {}
        return fields | ({"tool_calls": list(calls.values())} if calls else {})


# An ask, a function that makes it if its texts must be encoded, or the answer itself if the model is not asked.
AskOf = Callable[[Any, Served], Ask | Callable[[], Ask] | Output]


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
    """A protocol: the Struct of its body, how a body asks, and the format of its answer and of its stream.

    A body is read as a `body`, after `complete` has converted the fields that other programs send. `answer` is the type
    of a whole answer.
    """

    body: ClassVar[type[Struct]]
    answer: ClassVar[Any]
    ask: ClassVar[AskOf]
    complete: ClassVar[Complete] = as_given
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
