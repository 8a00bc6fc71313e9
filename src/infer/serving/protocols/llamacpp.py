"""llama.cpp's own routes `/completion` and `/infill`, for editors that speak to its server.

Their bodies are those of `/v1/completions`, with llama.cpp's names and formats.
"""

from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeVar, final

from msgspec import UNSET, Struct, UnsetType
from msgspec.structs import replace as replace_fields

from infer.engine.requests.ask import Ask
from infer.outputs import GenerationResult
from infer.request_limits import NUM_TOKENS_OF_CALLS
from infer.sampling_params import FILTER_NAMES, SEED_BITS
from infer.serving.protocols.bodies import Served, refusing, seed_of
from infer.serving.protocols.events import Accepted, Bytes, Count, Delta, Json, Output, Scored, Shape, without_end
from infer.serving.protocols.fields import Reading, refuse
from infer.serving.protocols.openai.ask import CompletionBody, TextBody, ask_text, between

_NEW_NAMES = {"n_predict": "max_tokens", "n_probs": "logprobs", "return_tokens": "return_token_ids", "n_cmpl": "n"}
_Body = TypeVar("_Body", bound=TextBody)
_BANNED = -100.0  # the smallest bias of a body, for a token whose bias is false
_SHOWN = ("seed", "temperature", *FILTER_NAMES, "presence_penalty", "frequency_penalty")


def complete_llamacpp(given: dict[str, Any], reading: Reading) -> dict[str, Any]:
    """Return a body of llama.cpp with the names and the formats of values of `/v1/completions`.

    Without `n_predict`, an answer is as long as the context allows. Raises BodyError for a grammar in GBNF.
    """
    found = {_NEW_NAMES.get(name, name): value for name, value in given.items() if value is not None}
    reading.given_names.update({ours: name for name, ours in _NEW_NAMES.items() if name in given})
    found.setdefault("max_tokens", -1)
    if found["max_tokens"] == -2:  # until the context is full
        found["max_tokens"] = -1
    if (num := found.get("logprobs")) == 0 and type(num) is int:
        del found["logprobs"]
    if isinstance(bias := found.get("logit_bias"), list):
        found["logit_bias"] = _bias_by_id(bias)
    if isinstance(grammar := found.get("grammar"), str) and (not grammar or "::=" in grammar):
        if grammar:
            message = "grammar must be in Lark's syntax, got GBNF: rewrite it, or use json_schema"
            raise refuse(message, "grammar")
        del found["grammar"]
    return found


def _bias_by_id(pairs: list[Any]) -> dict[str, Any]:
    """Return the biases by token id. `false` bans a token. Raises BodyError."""
    found = dict[str, Any]()
    for index, pair in enumerate(pairs):
        match pair:
            case [int(token_id), bool(bias)] if not bias:
                found[str(token_id)] = _BANNED
            case [int(token_id), int() | float() as bias]:
                found[str(token_id)] = bias
            case _:
                path = f"logit_bias[{index}]"
                raise refuse(f"{path} must be a token id and its bias, such as [15043, -1.5]", path)
    return found


@final
class ContinuationBody(CompletionBody, kw_only=True):
    """A request to continue `prompt`, in llama.cpp's names."""

    complete = complete_llamacpp

    def ask(self, served: Served) -> Ask | Callable[[], Ask]:
        """Return what the body asks. Raises BodyError."""
        return CompletionBody.ask(_settled(self, served), served)


@final
class InfillFile(Struct, kw_only=True):
    """Another file of the project, or a part of it."""

    text: str
    filename: str = "file"


@final
class InfillBody(TextBody, kw_only=True):
    """A request for the text between two texts. `prompt` is the beginning of the line, after `input_prefix`."""

    complete = complete_llamacpp

    input_prefix: str
    input_suffix: str
    input_extra: list[InfillFile] | None = None
    prompt: str | None = None

    def ask(self, served: Served) -> Callable[[], Ask]:
        """Return a function that makes what the body asks. Raises BodyError."""
        asked, most = ask_text(_settled(self, served), served), served.llm.max_seq_len
        before = self.input_prefix + (self.prompt or "")
        files = [(each.filename, each.text) for each in self.input_extra or ()]
        room = most - min(asked.params[0].max_new_tokens or NUM_TOKENS_OF_CALLS, most // 2)

        def encode() -> Ask:
            with refusing("input_prefix"):
                prompt = served.llm.tokenizer.encode_infill(before, self.input_suffix, files, max_tokens=room)
            return between(asked, [prompt], served)

        return encode


def _settled(body: _Body, served: Served) -> _Body:
    """Return the body with a seed in place of -1, and with one token in place of none.

    A body that asks for no token has its prompt read into the cache. The seed is derived from the request's id, so that
    another process continues the answer with the same seed.
    """
    seed = seed_of(0, served.id) >> (64 - SEED_BITS) if body.seed == -1 else body.seed
    return replace_fields(body, seed=seed, max_tokens=body.max_tokens or 1)


class LlamacppProbability(Struct):
    """A token with its log-probability, and the likeliest tokens with theirs."""

    id: Count
    token: str
    bytes: Bytes | None
    logprob: float
    top_logprobs: list[Json]


class LlamacppTimings(Struct):
    """Numbers of tokens, and times in milliseconds."""

    cache_n: Count
    prompt_n: Count
    prompt_ms: float
    prompt_per_token_ms: float
    prompt_per_second: float
    predicted_n: Count
    predicted_ms: float
    predicted_per_token_ms: float
    predicted_per_second: float


class LlamacppPart(Output, kw_only=True):
    """A part of an answer. `id_slot` is always -1: slots have no numbers for clients."""

    index: Count
    content: str
    tokens: list[int]
    stop: bool
    id_slot: int = -1
    tokens_predicted: Count
    tokens_evaluated: Count
    completion_probabilities: list[LlamacppProbability] | UnsetType = UNSET


class LlamacppCompletion(LlamacppPart, kw_only=True):
    """An answer, or the last event of a stream. Its content is the text that no earlier event had."""

    model: str
    generation_settings: Json
    prompt: str
    has_new_line: bool
    truncated: bool
    stop_type: Literal["eos", "word", "limit"]
    stopping_word: str
    tokens_cached: Count
    timings: LlamacppTimings


class LlamacppShape(Shape):
    last = b""

    def __init__(self, accepted: Accepted, body: TextBody) -> None:
        self._served, self._params, self._prompt_ids = accepted.served, accepted.ask.params, accepted.prompt_ids
        self._spelling = accepted.spelling
        self._limit, self._has_tokens = body.max_tokens, bool(body.return_token_ids or body.stream)
        self._num_predicted = [0] * len(self._prompt_ids) * len(self._params)

    def whole(self, results: Sequence[GenerationResult]) -> LlamacppCompletion | list[LlamacppCompletion]:
        found = [
            self._last(index, result, result.text, result.token_ids, self._scored(result))
            for index, result in enumerate(results)
        ]
        return found[0] if len(found) == 1 else found

    def chunks(self, part: Delta) -> list[LlamacppPart]:
        if part.result is not None:
            return [self._last(part.choice, part.result, part.text, [], UNSET)]
        if self._params[0].logprobs is None:
            return self._events(part)
        parts = [Delta.of(part.choice, [piece]) for piece in part.pieces]  # an event with probabilities has one piece
        return [event for each in parts for event in self._events(each)]

    def _events(self, part: Delta) -> list[LlamacppPart]:
        """Return the event of a part, or none if it shows nothing yet."""
        index = part.choice
        self._num_predicted[index] += len(part.pieces)
        scored = self._scored(part)
        if not (part.text or scored) or self._limit == 0:
            return []
        fields = self._part(index, part.text, part.token_ids, scored)
        num_predicted, num_read = self._num_predicted[index], len(self._ids_of(index))
        return [LlamacppPart(**fields, stop=False, tokens_predicted=num_predicted, tokens_evaluated=num_read)]

    def _part(self, index: int, text: str, token_ids: Sequence[int], scored: Any) -> dict[str, Any]:
        content = "" if self._limit == 0 else text
        tokens = list(token_ids) if self._has_tokens else []
        return {"index": index, "content": content, "tokens": tokens, "completion_probabilities": scored}

    def _last(
        self, index: int, result: GenerationResult, text: str, token_ids: Sequence[int], scored: Any
    ) -> LlamacppCompletion:
        params = self._params[index % len(self._params)]
        settings = {name: getattr(params, name) for name in _SHOWN}
        word = result.stop_reason if result.finish_reason == "stop" else None
        is_word = isinstance(word, str)
        num_predicted = 0 if self._limit == 0 else result.generated_tokens
        return LlamacppCompletion(
            **self._part(index, text, token_ids, scored),
            stop=True,
            tokens_predicted=num_predicted,
            tokens_evaluated=result.prompt_tokens,
            model=self._served.model,
            generation_settings={"n_ctx": self._served.llm.max_seq_len, "n_predict": self._limit} | settings,
            prompt=self._served.llm.tokenizer.decode(self._ids_of(index), skip_special_tokens=False),
            has_new_line="\n" in result.text,
            truncated=False,
            stop_type="word" if is_word else "eos" if result.finish_reason in ("eos", "stop") else "limit",
            stopping_word=str(word) if is_word else "",
            tokens_cached=result.prompt_tokens + num_predicted,
            timings=_timings(result),
        )

    def _ids_of(self, index: int) -> Sequence[int]:
        return self._prompt_ids[index // len(self._params)]

    def _scored(self, scored: Scored) -> Any:
        if self._params[0].logprobs is None:
            return UNSET
        return [
            LlamacppProbability(
                each.token_id,
                **self._spelling.entry(each.token_id, each.logprob),
                top_logprobs=[{"id": top[0]} | self._spelling.entry(*top) for top in each.top],
            )
            for each in without_end(scored)
        ]


@final
class ContinuationShape(LlamacppShape):
    body, answer = ContinuationBody, LlamacppCompletion | list[LlamacppCompletion]


@final
class InfillShape(LlamacppShape):
    body, answer = InfillBody, LlamacppCompletion


def _timings(result: GenerationResult) -> LlamacppTimings:
    timing, num_read = result.timing, result.prompt_tokens - result.reused_tokens
    prompt = _rates(num_read, 1000 * timing.ttft_s)
    predicted = _rates(result.generated_tokens, 1000 * (timing.decode_time_s + timing.sampling_time_s))
    return LlamacppTimings(result.reused_tokens, num_read, *prompt, result.generated_tokens, *predicted)


def _rates(count: int, milliseconds: float) -> tuple[float, float, float]:
    """Return the milliseconds, those per token, and the tokens per second."""
    per_token = milliseconds / count if count else 0.0
    return milliseconds, per_token, 1000 * count / milliseconds if milliseconds else 0.0
