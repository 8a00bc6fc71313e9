"""Parts of answers that several protocols share: their Structs, usage, log-probabilities, and OpenAI's messages.

Encoder and openapi.json read the same Structs. The Structs of one protocol are in its `events`.
"""

from collections.abc import Collection, Iterable, Sequence
from itertools import starmap
from typing import Annotated, Any, Literal, NamedTuple, Protocol, Self, runtime_checkable

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

import infer
from infer.outputs import FinishReason, GenerationResult, TokenLogprob, ToolCall

Json = dict[str, Any]
Count = Annotated[int, Meta(ge=0)]
Bytes = list[Annotated[int, Meta(ge=0, le=255)]]
TextFinishReason = Annotated[str, Meta(extra_json_schema={"enum": ["stop", "length"]})]
ChatFinishReason = Annotated[str, Meta(extra_json_schema={"enum": ["stop", "length", "tool_calls"]})]
StopReason = str | int | None
FINISH_REASONS = {"eos": "stop", "stop": "stop", "length": "length", "abort": "length"}  # aborted: its timeout expired
LEAST_LOGPROB = -9999.0  # of an impossible token: JSON has no infinity
Entry = dict[str, Any]


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


class ErrorFields(Struct):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorOutput(Struct, kw_only=True):
    """The error format of every route. `type` is set only in the errors of Anthropic's routes.

    On Ollama's routes `error` is only the message, and `code` is next to it.
    """

    type: Literal["error"] | UnsetType = UNSET
    error: ErrorFields | str
    code: str | UnsetType = UNSET


class PromptTokensDetails(Struct):
    """Tokens of prompts that were not read again. `disk_tokens` of them were loaded from disk, if any were."""

    cached_tokens: Count
    disk_tokens: Count | UnsetType = UNSET


class CompletionTokensDetails(Struct):
    """Accepted and rejected predictions are the tokens of the server's own drafts."""

    reasoning_tokens: Count
    accepted_prediction_tokens: Count
    rejected_prediction_tokens: Count


class Usage(Struct):
    prompt_tokens: Count
    completion_tokens: Count
    total_tokens: Count
    prompt_tokens_details: PromptTokensDetails | UnsetType = UNSET
    completion_tokens_details: CompletionTokensDetails | UnsetType = UNSET


class CalledFunction(Struct):
    name: str
    arguments: str


class CalledTool(Struct):
    id: str
    type: Literal["function"]
    function: CalledFunction


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


class HeadedOutput(Output):
    """An answer that begins with the fields of `Head`."""

    id: str
    created: Count
    model: str
    system_fingerprint: str


def usage_of(results: Sequence[GenerationResult], num_choices: int) -> Usage:
    """Return the usage. A prompt counts once, however many choices it has."""
    firsts = results[::num_choices]  # the choice of each prompt that read it
    num_prompt_tokens = sum(result.prompt_tokens for result in firsts)
    num_completion = sum(result.generated_tokens for result in results)
    proposed = sum(result.stats.drafts_proposed for result in results)
    accepted = sum(result.stats.drafts_accepted for result in results)
    num_reasoning = sum(result.reasoning_tokens for result in results)
    from_disk = sum(result.disk_tokens for result in firsts) or UNSET
    return Usage(
        num_prompt_tokens,
        num_completion,
        num_prompt_tokens + num_completion,
        PromptTokensDetails(sum(result.reused_tokens for result in firsts), from_disk),
        CompletionTokensDetails(num_reasoning, accepted, proposed - accepted),
    )


def extension(results: Iterable[tuple[int, GenerationResult]]) -> Extension:
    """Return our own facts about the choices with these indices."""
    return Extension(choices=[*starmap(_facts, results)])


def _facts(index: int, result: GenerationResult) -> ChoiceFacts:
    timing, rate = result.timing, result.timing.decode_tokens_per_second
    return ChoiceFacts(index, result.seed, result.stop_reason, timing.ttft_s, timing.decode_time_s, rate)


def finish_reason_of(result: GenerationResult) -> str:
    """Return OpenAI's name of the finish reason."""
    reason = FINISH_REASONS[result.finish_reason]
    return "tool_calls" if reason == "stop" and result.tool_calls else reason


def message_of(result: GenerationResult) -> dict[str, Any]:
    """Return the answer as OpenAI's message. Its content is None if the answer has only calls."""
    message = result.to_message() | {"refusal": None}
    return message | {"content": None} if result.tool_calls and not result.text else message


def call_values(call: ToolCall) -> Any:
    """Return the arguments of a call as an object in the model's own spelling, or {} if the call was cut off.

    Values would change its numbers: JSON has no limit of digits.
    """
    try:
        return msgspec.json.decode(call.arguments, type=msgspec.Raw)
    except (msgspec.DecodeError, RecursionError):
        return {}


def reasoning_and_calls(result: GenerationResult) -> Json:
    """Return the reasoning and the calls of the answer's message, if it has them."""
    message = result.to_message()
    return {name: message[name] for name in ("reasoning_content", "tool_calls") if name in message}


@runtime_checkable
class Scored(Protocol):
    """Tokens with their log-probabilities, if these were requested: those of a whole answer, or of a part of it."""

    @property
    def token_ids(self) -> Sequence[int]: ...

    @property
    def logprobs(self) -> Sequence[TokenLogprob] | None: ...

    @property
    def finish_reason(self) -> FinishReason | None: ...


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

    def entry(self, token_id: int, logprob: float) -> Entry:
        """Return a token's entry. The `bytes` of an answer's tokens, joined, are its text; a control token has none."""
        spelt = None if token_id in self.control_ids else list(self.token_bytes[token_id])
        return {"token": self.text(token_id), "logprob": max(logprob, LEAST_LOGPROB), "bytes": spelt}

    def chat_entries(self, scored: Scored) -> list[Entry]:
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
