"""Results of a generation: tokens, text, finish reason, timing, and how one token was sampled. Loads no torch."""

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise, zip_longest
from typing import Any, Literal

FinishReason = Literal["eos", "stop", "length", "abort", "error"]
Origin = Literal["sampled", "draft", "forced", "given"]
# Ways to make one vector of the states of a text's tokens. "mean_sqrt_len" divides the sum by the square root of their
# number, and "weightedmean" weights each state by its position.
Pooling = Literal["mean", "last", "cls", "max", "weightedmean", "mean_sqrt_len"]


@dataclass(frozen=True, slots=True)
class Piece:
    """The part of a stream that one token adds.

    The text is empty if the token is half a character, or if its text may belong to a stop string. In an answer,
    reasoning comes first, then text, then tool calls.

    Examples:
        >>> piece = next(llm.stream("The capital of France is", temperature=0, max_new_tokens=2))
        >>> piece.token_id, piece.text, piece.origin
        (7042, ' Paris', 'sampled')
    """

    token_id: int
    text: str
    logprob: "TokenLogprob | None" = None  # if log-probabilities are requested
    finish_reason: FinishReason | None = None  # why the answer ended, in the last piece
    deltas: "tuple[ReasoningDelta | ToolCallDelta, ...]" = ()
    origin: Origin = "sampled"  # "draft": drafted and verified; "forced": by the grammar; "given": in the request


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """The next part of the model's reasoning.

    Examples:
        >>> [delta.text for piece in [Piece(7, "", deltas=(ReasoningDelta("First, "),))] for delta in piece.deltas]
        ['First, ']
    """

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """A part of the tool call number `index`: its beginning, with id and name, or more characters of its arguments.

    Examples:
        >>> ToolCallDelta(index=0, arguments='{"city"').arguments
        '{"city"'
    """

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A function that the model wants to call. `arguments` is the model's JSON, which is cut if the answer was cut.

    Examples:
        >>> ToolCall(id="call_1", name="get_weather", arguments='{"city": "Paris"}').parsed()["city"]
        'Paris'
    """

    id: str
    name: str
    arguments: str

    def to_json(self) -> dict[str, Any]:
        """Return the call in OpenAI's format.

        Examples:
            >>> ToolCall("call_1", "get_weather", "{}").to_json()["function"]
            {'name': 'get_weather', 'arguments': '{}'}
        """
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}

    def parsed(self) -> dict[str, Any]:
        """Return the arguments as values.

        Raises:
            ValueError: The arguments were cut.

        Examples:
            >>> ToolCall("call_1", "get_weather", '{"city": "Paris"}').parsed()
            {'city': 'Paris'}
        """
        found: dict[str, Any] = json.loads(self.arguments)
        return found


def assembled(deltas: "Iterable[ReasoningDelta | ToolCallDelta]") -> tuple[str | None, tuple[ToolCall, ...]]:
    """Return the reasoning and the calls that the deltas contain together."""
    reasoning, calls = list[str](), list[ToolCall]()
    for delta in deltas:
        if isinstance(delta, ReasoningDelta):
            reasoning.append(delta.text)
        elif delta.index == len(calls):
            calls.append(ToolCall(delta.id or "", delta.name or "", delta.arguments))
        else:
            last = calls[-1]
            calls[-1] = ToolCall(last.id, last.name, last.arguments + delta.arguments)
    return "".join(reasoning) or None, tuple(calls)


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """The log-probability and the rank of a token; 1 is the likeliest. `top` has alternatives as (id, logprob)."""

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()


_WARM_UP_STEPS = 2  # first steps of an answer, which use memory and code for the first time


@dataclass(frozen=True, slots=True, repr=False)
class GenerationTiming:
    """Measured times of an answer, in seconds. A figure without any measurement is None.

    The clock is read after every forward and every sampling, even if several steps run without a return to Python. The
    device is synchronised around both.

    The first token's forward and sampling are the prefill. For each later sampled token, `decode_times_s[i]` is its
    forward with the Python time before it, and `sampling_times_s[i]` is the sampling after it. A step that verifies
    drafts gives several tokens: the first one has the time of the forward, the others have 0. `arrival_times_s` has the
    time from the beginning of the request until each token, forced ones included, reached the caller.

    Examples:
        >>> timing = llm.generate("Once upon a time", max_new_tokens=4).timing
        >>> timing.ttft_s > 0, timing.total_time_s > timing.ttft_s
        (True, True)
    """

    prefill_time_s: float = 0.0
    decode_times_s: list[float] = field(default_factory=list)
    sampling_times_s: list[float] = field(default_factory=list)
    arrival_times_s: list[float] = field(default_factory=list)

    @property
    def ttft_s(self) -> float:
        """Seconds from the start of the prefill to the first sampled token."""
        return self.prefill_time_s

    @property
    def decode_time_s(self) -> float:
        """Seconds of all forwards after the prefill."""
        return sum(self.decode_times_s, 0.0)

    @property
    def sampling_time_s(self) -> float:
        """Seconds of sampling after the first token."""
        return sum(self.sampling_times_s, 0.0)

    @property
    def total_time_s(self) -> float:
        """Seconds of prefill, decoding and sampling."""
        # The grouping keeps total ≥ prefill + decode to the last bit.
        return (self.prefill_time_s + self.decode_time_s) + self.sampling_time_s

    @property
    def inter_token_times_s(self) -> list[float]:
        """Seconds from the sampling of one token to the sampling of the next: forward plus sampling."""
        return [sum(pair, 0.0) for pair in zip_longest(self.decode_times_s, self.sampling_times_s, fillvalue=0.0)]

    @property
    def arrival_gaps_s(self) -> list[float]:
        """Seconds between the arrivals of two tokens, as a reader sees them when several steps run without a return."""
        return [after - before for before, after in pairwise(self.arrival_times_s)]

    @property
    def decode_tokens_per_second(self) -> float | None:
        """Tokens divided by the time of their steps, including sampling.

        The first two steps are left out if there are more.
        """
        times = self.inter_token_times_s
        first_of_step = [index for index, forward_s in enumerate(self.decode_times_s) if forward_s > 0]
        settled = times[first_of_step[_WARM_UP_STEPS] :] if len(first_of_step) > _WARM_UP_STEPS else times
        seconds = sum(settled, 0.0)
        return len(settled) / seconds if seconds > 0 else None

    @property
    def inter_token_p50_s(self) -> float | None:
        """Median of `inter_token_times_s`."""
        return _percentile(self.inter_token_times_s, 50.0)

    @property
    def inter_token_p95_s(self) -> float | None:
        """95th percentile of `inter_token_times_s`."""
        return _percentile(self.inter_token_times_s, 95.0)

    @property
    def inter_token_p99_s(self) -> float | None:
        """99th percentile of `inter_token_times_s`."""
        return _percentile(self.inter_token_times_s, 99.0)

    def __repr__(self) -> str:
        return f"GenerationTiming(ttft {1e3 * self.ttft_s:.1f} ms, {len(self.decode_times_s)} steps{_rate(self)})"

    def to_json(self) -> dict[str, Any]:
        """Return the times and the figures derived from them as plain lists and numbers.

        Examples:
            >>> sorted(llm.generate("Once upon a time", max_new_tokens=4).timing.to_json())[:2]
            ['arrival_gap_p50_s', 'arrival_gap_p95_s']
        """
        gaps = self.arrival_gaps_s
        return asdict(self) | {
            "ttft_s": self.ttft_s,
            "decode_time_s": self.decode_time_s,
            "total_time_s": self.total_time_s,
            "decode_tokens_per_second": self.decode_tokens_per_second,
            "inter_token_p50_s": self.inter_token_p50_s,
            "inter_token_p95_s": self.inter_token_p95_s,
            "inter_token_p99_s": self.inter_token_p99_s,
            "arrival_gap_p50_s": _percentile(gaps, 50.0),
            "arrival_gap_p95_s": _percentile(gaps, 95.0),
            "arrival_gap_p99_s": _percentile(gaps, 99.0),
        }


@dataclass(slots=True, repr=False)
class GenerationStats:
    """Counts of the work for one generation.

    A step is one forward. A multi-step is several forwards without a return to Python.
    """

    prefill_steps: int = 0  # steps that only filled the cache
    single_steps: int = 0  # steps that gave one token, or verified drafts
    multi_steps: int = 0
    multi_step_tokens: int = 0
    drafts_proposed: int = 0
    drafts_accepted: int = 0
    masks_filled: int = 0
    tokens_forced: int = 0
    preemptions: int = 0  # times that the sequence lost its pages and was computed again

    def __repr__(self) -> str:
        """Return the counts that are not 0."""
        return f"GenerationStats({', '.join(f'{name}={count}' for name, count in asdict(self).items() if count)})"


@dataclass(frozen=True, slots=True, repr=False)
class GenerationResult:
    """A finished answer. `token_ids` contains every generated token. `text` ends before the stop string.

    Examples:
        >>> result = llm.generate("The capital of France is", temperature=0, max_new_tokens=2)
        >>> result.text, result.finish_reason, result.generated_tokens
        (' Paris.', 'length', 2)
    """

    token_ids: list[int]
    text: str
    finish_reason: FinishReason
    prompt_tokens: int
    generated_tokens: int
    timing: GenerationTiming
    stop_reason: str | int | None = None  # a stop string or id, or a reason: docs/reference/stops.md
    seed: int | None = None  # the seed that gives these tokens again
    logprobs: list[TokenLogprob] | None = None  # one per generated token, if requested
    grammar_complete: bool | None = None  # None without a grammar
    reused_tokens: int = 0  # tokens of the prompt that were already in the cache
    disk_tokens: int = 0  # of these, tokens whose keys and values were loaded from disk
    dropped_tokens: int = 0  # cached tokens that the prompt does not have
    truncated_tokens: int = 0  # tokens of the prompt that overflow="truncate_left" dropped
    stats: GenerationStats = field(default_factory=GenerationStats)
    error: str | None = None  # the reason, if finish_reason is "error"
    reasoning: str | None = None  # None if there is none, or if it is a part of the text
    tool_calls: tuple[ToolCall, ...] = ()
    reasoning_tokens: int = 0  # includes the tokens that open and close the reasoning
    warnings: tuple[str, ...] = ()  # parts of tools and past calls that were left out or changed

    def to_message(self) -> dict[str, Any]:
        """Return the answer as a message of the conversation, in OpenAI's format.

        Examples:
            >>> llm.generate("The capital of France is", temperature=0, max_new_tokens=2).to_message()
            {'role': 'assistant', 'content': ' Paris.'}
        """
        message: dict[str, Any] = {"role": "assistant", "content": self.text}
        if self.reasoning is not None:
            message["reasoning_content"] = self.reasoning
        if self.tool_calls:
            message["tool_calls"] = [call.to_json() for call in self.tool_calls]
        return message

    def __repr__(self) -> str:
        """Return one line; `text` and `timing` contain the full values."""
        reason: str = self.finish_reason
        if self.error is not None or reason in ("length", "stop"):
            reason += f": {_shortened(self.stop_reason if self.error is None else self.error)}"
        shown = [*([repr(self.text)] if self.text or not self.tool_calls else []), *map(_shown_call, self.tool_calls)]
        num_tokens = len(self.token_ids)
        return f"GenerationResult({_shortened(', '.join(shown))}, {reason}, {num_tokens} tokens{_rate(self.timing)})"

    def to_json(self) -> dict[str, Any]:
        """Return plain lists, dicts, numbers and strings. A log-probability of −inf is None.

        Examples:
            >>> llm.generate("The capital of France is", temperature=0, max_new_tokens=2).to_json()["text"]
            ' Paris.'
        """
        record = asdict(self) | {"timing": self.timing.to_json()}
        if self.logprobs is not None:
            record["logprobs"] = [_logprob_to_json(entry) for entry in self.logprobs]
        return record


@dataclass(frozen=True, slots=True)
class TraceStage:
    """Effect of one step of the sampler.

    A step that only bans moves nothing. A step that only reweighs removes nothing.
    """

    name: str  # a name of `sampling.definition.stages`; the first is "raw"
    value: int | float | None  # value of its parameter, if that is one number
    num_kept: int  # tokens that are still possible after it
    removed: float  # probability, before the step, of the tokens that it made impossible
    moved: float  # total variation among the kept tokens, renormalised before the step
    others: float  # probability, after the step, of all tokens that are not candidates


@dataclass(frozen=True, slots=True)
class TraceCandidate:
    """One token and its values after each stage: entry i of `logits` and `probabilities` is after stage i."""

    token_id: int
    text: str  # bytes that are not valid text are shown as \\x and two digits
    rank: int  # by raw logit; 1 is the likeliest
    logits: tuple[float | None, ...]  # None: impossible
    probabilities: tuple[float, ...]
    noise: float | None  # None if the token was dropped, or if the row is greedy
    score: float | None  # last logit plus noise; the largest is chosen. None if dropped
    dropped_by: str | None  # the stage that made it impossible


@dataclass(frozen=True, slots=True)
class SampleTrace:
    """How one token was sampled. `candidates` are in the order of their raw logits, and include the chosen token."""

    stages: tuple[TraceStage, ...]
    candidates: tuple[TraceCandidate, ...]
    token_id: int  # the chosen token
    position: int  # number of tokens before it
    step: int  # 1 is the first token after the prompt
    seed: int | None  # None if greedy
    text_before: str = ""

    @property
    def chosen(self) -> TraceCandidate:
        """The candidate that was chosen."""
        return next(candidate for candidate in self.candidates if candidate.token_id == self.token_id)

    def to_json(self) -> dict[str, Any]:
        """Return plain lists, dicts, numbers and strings."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class RankedDocument:
    """A document of `LLM.rerank`: its place in the given list, and the probability that it is relevant.

    Examples:
        >>> RankedDocument(index=1, score=0.98, document="Cats sleep on warm roofs.").index
        1
    """

    index: int
    score: float
    document: str


def ranked(scores: Sequence[float], documents: Sequence[str], top_n: int | None) -> list[RankedDocument]:
    """Return at most `top_n` documents, the most relevant first. If two scores are equal, the first one comes first."""
    order = sorted(range(len(scores)), key=lambda index: -scores[index])[:top_n]
    return [RankedDocument(index, scores[index], documents[index]) for index in order]


@dataclass(frozen=True, slots=True)
class Classification:
    """The labels of a text, the most probable first, and the probability of each label.

    If exactly one label is right, the probabilities add up to 1. If several labels may be right, each has its own
    probability. A regression has values instead.

    Examples:
        >>> found = Classification(labels=("negative", "positive"), probabilities=(0.9, 0.1))
        >>> found.label, found.probability
        ('negative', 0.9)
    """

    labels: tuple[str, ...]
    probabilities: tuple[float, ...]

    @property
    def label(self) -> str:
        """The most probable label."""
        return self.labels[0]

    @property
    def probability(self) -> float:
        """The probability of the most probable label."""
        return self.probabilities[0]

    def to_json(self) -> dict[str, Any]:
        """Return plain lists, numbers and strings.

        Examples:
            >>> Classification(labels=("negative",), probabilities=(0.9,)).to_json()
            {'labels': ['negative'], 'probabilities': [0.9]}
        """
        return {"labels": list(self.labels), "probabilities": list(self.probabilities)}


def percentile(values: Sequence[float], percent: float) -> float:
    """Return a percentile by linear interpolation between the order statistics, as numpy does; 0 for no values."""
    if not values:
        return 0.0
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def _shown_call(call: ToolCall) -> str:
    return f"{call.name}({call.arguments})"


def _shortened(value: object) -> str:
    text = " ".join(str(value).splitlines())
    return text if len(text) <= 80 else text[:79] + "…"


def _rate(timing: GenerationTiming) -> str:
    rate = timing.decode_tokens_per_second
    return "" if rate is None else f", {rate:.1f} tok/s"


def _percentile(values: Sequence[float], percent: float) -> float | None:
    return percentile(values, percent) if values else None


def _logprob_to_json(entry: TokenLogprob) -> dict[str, Any]:
    return {
        "token_id": entry.token_id,
        "logprob": finite(entry.logprob),
        "rank": entry.rank,
        "top": [{"token_id": token_id, "logprob": finite(logprob)} for token_id, logprob in entry.top],
    }


def finite(value: float) -> float | None:
    """Return the value, or None if JSON cannot write it."""
    return value if math.isfinite(value) else None
