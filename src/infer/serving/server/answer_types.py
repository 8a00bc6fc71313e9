"""Structs that the answers of several routes share. Encoder and openapi.json read the same Structs.

The Struct of an answer that only one route gives is defined next to that route's handler.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple

from msgspec import UNSET, Meta, Struct, UnsetType

from infer.outputs import GenerationResult, Piece, TokenLogprob
from infer.serving.protocols.chat_answers import Spelling

Json = dict[str, Any]
Count = Annotated[int, Meta(ge=0)]
Bytes = list[Annotated[int, Meta(ge=0, le=255)]]
FinishReason = Annotated[str, Meta(extra_json_schema={"enum": ["stop", "length"]})]
ChatFinishReason = Annotated[str, Meta(extra_json_schema={"enum": ["stop", "length", "tool_calls"]})]
StopReason = str | int | None


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


class Answer(Struct, kw_only=True):
    """An answer or a chunk of one. A Struct of an answer adds its fields before `infer`."""

    infer: Extension | UnsetType = UNSET


class ErrorFields(Struct):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(Struct, kw_only=True):
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


class AnswerHead(NamedTuple):
    """The fields that an answer and all its chunks begin with."""

    id: str
    created: int
    model: str
    system_fingerprint: str


class HeadedAnswer(Answer):
    """An answer that begins with the fields of `AnswerHead`."""

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
    from_disk = sum(result.disk_tokens for result in firsts)
    return Usage(
        num_prompt_tokens,
        num_completion,
        num_prompt_tokens + num_completion,
        PromptTokensDetails(sum(result.reused_tokens for result in firsts), from_disk or UNSET),
        CompletionTokensDetails(num_reasoning, accepted, proposed - accepted),
    )


def extension(results: Mapping[int, GenerationResult]) -> Extension:
    """Return our own facts about the choices with these indices."""
    facts = [
        ChoiceFacts(
            index,
            result.seed,
            result.stop_reason,
            result.timing.ttft_s,
            result.timing.decode_time_s,
            result.timing.decode_tokens_per_second,
        )
        for index, result in results.items()
    ]
    return Extension(choices=facts)


def token_columns(pieces: Sequence[Piece], token_bytes: Sequence[bytes]) -> Json:
    """Return the ids, bytes and origins of a chunk's tokens, for clients that request token ids."""
    return {
        "token_ids": [piece.token_id for piece in pieces],
        "token_bytes": [list(token_bytes[piece.token_id]) for piece in pieces],
        "token_origins": [piece.origin for piece in pieces],
    }


def logprobs_of(pieces: Sequence[Piece]) -> list[TokenLogprob]:
    return [piece.logprob for piece in pieces if piece.logprob is not None]


def prompt_logprobs_of(logprobs: Iterable[TokenLogprob | None], spelling: Spelling) -> list[Json | None]:
    """Return a prompt's log-probabilities in vLLM's format: by token id, and null for the first token."""
    return [
        None
        if each is None
        else {
            str(token_id): {"logprob": logprob, "decoded_token": spelling.text(token_id)}
            for token_id, logprob in (*each.top, (each.token_id, each.logprob))
        }
        for each in logprobs
    ]
