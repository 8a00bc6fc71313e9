"""Fields that the answers of several of OpenAI's routes share."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from infer.batch_file.openai_logprobs import Spelling
from infer.outputs import GenerationResult, Piece, TokenLogprob

Json = dict[str, Any]


class Head(NamedTuple):
    """Fields that an answer and all its chunks share."""

    id: str
    created: int
    model: str
    system_fingerprint: str

    def to_json(self, kind: str) -> Json:
        return {"id": self.id, "object": kind, **self._asdict()}


def usage_of(num_prompt_tokens: int, results: Sequence[GenerationResult], num_cached: int) -> Json:
    """Return the usage. A prompt counts once, however many choices it has.

    Accepted and rejected predictions are the tokens of our own drafts.
    """
    num_completion = sum(result.generated_tokens for result in results)
    proposed = sum(result.stats.drafts_proposed for result in results)
    accepted = sum(result.stats.drafts_accepted for result in results)
    return {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_completion,
        "total_tokens": num_prompt_tokens + num_completion,
        "prompt_tokens_details": {"cached_tokens": num_cached},
        "completion_tokens_details": {
            "reasoning_tokens": sum(result.reasoning_tokens for result in results),
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": proposed - accepted,
        },
    }


def usage_of_choices(results: Sequence[GenerationResult], num_choices: int) -> Json:
    firsts = results[::num_choices]  # of each prompt: the one that read it
    num_prompt_tokens = sum(result.prompt_tokens for result in firsts)
    return usage_of(num_prompt_tokens, results, sum(result.reused_tokens for result in firsts))


def extension(results: Mapping[int, GenerationResult]) -> Json:
    """Return the value of our own key `infer`: each choice's seed, stop reason and times."""
    return {
        "choices": [
            {
                "index": index,
                "seed": result.seed,
                "stop_reason": result.stop_reason,
                "ttft_seconds": result.timing.ttft_s,
                "decode_seconds": result.timing.decode_time_s,
                "decode_tokens_per_second": result.timing.decode_tokens_per_second,
            }
            for index, result in results.items()
        ]
    }


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
