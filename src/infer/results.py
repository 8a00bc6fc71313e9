"""What a generation gives back: the tokens, the text, why it ended, and where the time went; and how one
token was sampled. Free of torch."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import zip_longest
from typing import Any, Literal

FinishReason = Literal["eos", "stop", "length", "abort", "error"]


@dataclass(frozen=True, slots=True)
class Piece:
    """What one token adds to the stream. The text may be empty: half a character, or held back."""

    token_id: int
    text: str


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """One token's log-probability and rank (1 is the likeliest), and the likeliest alternatives as (id, logprob)."""

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class GenerationTiming:
    """Seconds, with the device synchronised around each region.

    The first token's forward and sampling are the prefill. Each later token is one step: `decode_times_s[i]` is
    its forward, `sampling_times_s[i]` the sampling that followed.
    """

    prefill_time_s: float = 0.0
    decode_times_s: list[float] = field(default_factory=list)
    sampling_times_s: list[float] = field(default_factory=list)

    @property
    def ttft_s(self) -> float:
        """From the start of the prefill to the first token sampled."""
        return self.prefill_time_s

    @property
    def decode_time_s(self) -> float:
        return sum(self.decode_times_s, 0.0)

    @property
    def sampling_time_s(self) -> float:
        return sum(self.sampling_times_s, 0.0)

    @property
    def total_time_s(self) -> float:
        # The grouping keeps total ≥ prefill + decode to the last bit.
        return (self.prefill_time_s + self.decode_time_s) + self.sampling_time_s

    @property
    def inter_token_times_s(self) -> list[float]:
        """Forward and sampling of each step: what passes between two tokens."""
        return [sum(pair, 0.0) for pair in zip_longest(self.decode_times_s, self.sampling_times_s, fillvalue=0.0)]

    @property
    def decode_tokens_per_second(self) -> float:
        """Steps over the time of the steps, sampling included; 0 where there was no step."""
        steps_s = self.decode_time_s + self.sampling_time_s
        return len(self.decode_times_s) / steps_s if steps_s > 0 else 0.0

    @property
    def inter_token_p50_s(self) -> float:
        return percentile(self.inter_token_times_s, 50.0)

    @property
    def inter_token_p95_s(self) -> float:
        return percentile(self.inter_token_times_s, 95.0)

    @property
    def inter_token_p99_s(self) -> float:
        return percentile(self.inter_token_times_s, 99.0)

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {
            "ttft_s": self.ttft_s,
            "decode_time_s": self.decode_time_s,
            "total_time_s": self.total_time_s,
            "decode_tokens_per_second": self.decode_tokens_per_second,
            "inter_token_p50_s": self.inter_token_p50_s,
            "inter_token_p95_s": self.inter_token_p95_s,
            "inter_token_p99_s": self.inter_token_p99_s,
        }


@dataclass(slots=True)
class GenerationStats:
    """What the loop did for one generation. A step is one forward; a chain is several without a return to Python."""

    prefill_steps: int = 0  # that only filled the cache
    single_steps: int = 0  # that gave one token, or verified drafts
    chains: int = 0
    chain_tokens: int = 0
    drafts_proposed: int = 0
    drafts_accepted: int = 0
    masks_filled: int = 0
    tokens_forced: int = 0


@dataclass(frozen=True, slots=True)
class GenerationResult:
    """One finished sequence. `token_ids` holds every generated token, `text` ends before the stop string."""

    token_ids: list[int]
    text: str
    finish_reason: FinishReason
    prompt_tokens: int
    generated_tokens: int
    timing: GenerationTiming
    stop_reason: str | int | None = None  # the stop string or id, "max_new_tokens", "context", "grammar", "cancelled"
    seed: int | None = None  # the seed that gives these tokens again
    logprobs: list[TokenLogprob] | None = None  # one per generated token, where asked for
    grammar_complete: bool | None = None  # None without a grammar
    reused_tokens: int = 0  # prompt tokens that were in the cache already
    dropped_tokens: int = 0  # tokens in the cache that the prompt does not have: it was trimmed to what they share
    stats: GenerationStats = field(default_factory=GenerationStats)
    error: str | None = None  # what went wrong, where finish_reason is "error"

    @property
    def num_samples(self) -> int:
        """How many tokens were drawn."""
        return len(self.token_ids)

    def to_json(self) -> dict[str, Any]:
        """Plain lists, dicts, numbers and strings; a log-probability of −inf is None."""
        record = asdict(self) | {"timing": self.timing.to_json()}
        if self.logprobs is not None:
            record["logprobs"] = [_logprob_to_json(entry) for entry in self.logprobs]
        return record


@dataclass(frozen=True, slots=True)
class TraceStage:
    """What one step of the sampler did. A step that only bans moves nothing; one that only reweighs removes nothing."""

    name: str  # as in `sampling.sampler.stages`; the first is "raw"
    value: int | float | None  # of its parameter, where that is one number
    num_kept: int  # tokens that are still possible after it
    removed: float  # probability, before the step, of the tokens that it made impossible
    moved: float  # probability that changed places among the kept ones: their total variation, renormalised before
    others: float  # probability, after the step, of all tokens that are no candidates


@dataclass(frozen=True, slots=True)
class TraceCandidate:
    """One token on its way through the stages: entry i of `logits` and `probabilities` is after stage i."""

    token_id: int
    text: str  # bytes that are no text by themselves as \\x and two digits
    rank: int  # by raw logit; 1 is the likeliest
    logits: tuple[float | None, ...]  # None is impossible
    probabilities: tuple[float, ...]
    noise: float | None  # None where nothing was drawn: greedy, or dropped
    score: float | None  # last logit plus noise: the largest of the vocabulary is chosen; None where dropped
    dropped_by: str | None  # the stage that made it impossible


@dataclass(frozen=True, slots=True)
class SampleTrace:
    """How one token was sampled. `candidates` come in the order of their raw logits, the chosen one among them."""

    stages: tuple[TraceStage, ...]
    candidates: tuple[TraceCandidate, ...]
    token_id: int  # what was chosen
    position: int  # how many tokens stand before it
    step: int  # 1 is the first token after the prompt
    seed: int | None  # None where greedy
    text_before: str = ""

    @property
    def chosen(self) -> TraceCandidate:
        return next(candidate for candidate in self.candidates if candidate.token_id == self.token_id)

    def to_json(self) -> dict[str, Any]:
        """Plain lists, dicts, numbers and strings."""
        return asdict(self)


def percentile(values: Sequence[float], percent: float) -> float:
    """Linear interpolation between the order statistics, as numpy's default; 0 for no values."""
    if not values:
        return 0.0
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def _logprob_to_json(entry: TokenLogprob) -> dict[str, Any]:
    return {
        "token_id": entry.token_id,
        "logprob": _finite(entry.logprob),
        "rank": entry.rank,
        "top": [{"token_id": token_id, "logprob": _finite(logprob)} for token_id, logprob in entry.top],
    }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
