"""`/completion` and `/infill`: llama.cpp's own routes, for editors that speak to its server."""

from collections.abc import Sequence
from functools import partial
from typing import Any, Literal, NamedTuple, TypeVar, final

from msgspec import UNSET, Struct, UnsetType
from msgspec.structs import replace as replace_fields
from starlette.requests import Request
from starlette.responses import Response

import infer
from infer.engine.requests.ask import Ask
from infer.outputs import FinishReason, GenerationResult, Piece, TokenLogprob
from infer.request_limits import NUM_TOKENS_OF_CALLS
from infer.sampling_params import SEED_BITS, SamplingParams
from infer.serving.protocols.chat_answers import Spelling, without_end
from infer.serving.protocols.llamacpp import InfillBody, complete_llamacpp
from infer.serving.protocols.openai.ask import CompletionBody, ask_completion
from infer.serving.protocols.params import seed_of
from infer.serving.server.answer_types import Answer, Bytes, Count, Json, logprobs_of
from infer.serving.server.call import call_of
from infer.serving.server.choices import ChoicePart, accept
from infer.serving.server.endpoint import answer_any_model, post
from infer.serving.server.http_errors import ApiError
from infer.serving.server.replies import ReplyFormat, event, reply
from infer.serving.server.routes.completions import ask_to_complete, between
from infer.serving.server.routes.tokens import prepared
from infer.serving.server.server_state import ServerState

_Body = TypeVar("_Body", CompletionBody, InfillBody)
_SHOWN = ("seed", "temperature", "top_k", "top_p", "min_p", "presence_penalty", "frequency_penalty")


class LlamaProbability(Struct):
    """A token with its log-probability, and the likeliest tokens with theirs."""

    id: Count
    token: str
    bytes: Bytes | None
    logprob: float
    top_logprobs: list[Json]


class LlamaTimings(Struct):
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


class LlamaPart(Answer, kw_only=True):
    """A part of an answer. `id_slot` is always -1: slots have no numbers for clients."""

    index: Count
    content: str
    tokens: list[int]
    stop: bool
    id_slot: int = -1
    tokens_predicted: Count
    tokens_evaluated: Count
    completion_probabilities: list[LlamaProbability] | UnsetType = UNSET


class LlamaCompletion(LlamaPart, kw_only=True):
    """An answer, or the last event of a stream. Its content is the text that no earlier event had."""

    model: str
    generation_settings: Json
    prompt: str
    has_new_line: bool
    truncated: bool
    stop_type: Literal["eos", "word", "limit"]
    stopping_word: str
    tokens_cached: Count
    timings: LlamaTimings


class LlamaAsked(NamedTuple):
    """Facts about a request: its model, the ids of its prompts, its parameters, and the context length."""

    model: str
    prompt_ids: Sequence[Sequence[int]]
    params: Sequence[SamplingParams]
    context: int
    has_content: bool = True
    has_tokens: bool = False


def failure_of_llamacpp(error: ApiError) -> bytes:
    """Return the last event of a llama.cpp stream that fails."""
    return event(error.body)


@final
class LlamaShape(ReplyFormat):
    last = b""

    def __init__(self, asked: LlamaAsked, tokenizer: "infer.Tokenizer") -> None:
        self._asked, self._tokenizer, self._spelling = asked, tokenizer, Spelling.of(tokenizer)
        self._num_predicted = [0] * len(asked.prompt_ids) * len(asked.params)

    def whole(self, results: Sequence[GenerationResult]) -> LlamaCompletion | list[LlamaCompletion]:
        found = [
            self._last(
                index, result, result.text, result.token_ids, self._scored(result.logprobs, result.finish_reason)
            )
            for index, result in enumerate(results)
        ]
        return found[0] if len(found) == 1 else found

    def chunks(self, part: ChoicePart) -> list[LlamaPart]:
        if part.result is not None:
            return [self._last(part.choice, part.result, part.text, [], UNSET)]
        if self._asked.params[0].logprobs is None:
            return self._events(part.choice, part.pieces)
        return [found for piece in part.pieces for found in self._events(part.choice, [piece])]

    def _events(self, index: int, pieces: Sequence[Piece]) -> list[LlamaPart]:
        """Return the event of some pieces, or none if they show nothing yet. An event with probabilities has one."""
        self._num_predicted[index] += len(pieces)
        text = "".join(piece.text for piece in pieces)
        scored = self._scored(logprobs_of(pieces), pieces[-1].finish_reason)
        if not (text or scored) or not self._asked.has_content:
            return []
        fields = self._part(index, text, [piece.token_id for piece in pieces], scored)
        num_predicted, num_read = self._num_predicted[index], len(self._ids_of(index))
        return [LlamaPart(**fields, stop=False, tokens_predicted=num_predicted, tokens_evaluated=num_read)]

    def fail(self, error: ApiError) -> bytes:
        return failure_of_llamacpp(error)

    def _part(self, index: int, text: str, token_ids: Sequence[int], scored: Any) -> dict[str, Any]:
        content = text if self._asked.has_content else ""
        tokens = list(token_ids) if self._asked.has_tokens else []
        return {"index": index, "content": content, "tokens": tokens, "completion_probabilities": scored}

    def _last(
        self, index: int, result: GenerationResult, text: str, token_ids: Sequence[int], scored: Any
    ) -> LlamaCompletion:
        asked, params = self._asked, self._asked.params[index % len(self._asked.params)]
        settings = {name: getattr(params, name) for name in _SHOWN}
        word = result.stop_reason if result.finish_reason == "stop" else None
        is_word = isinstance(word, str)
        return LlamaCompletion(
            **self._part(index, text, token_ids, scored),
            stop=True,
            tokens_predicted=result.generated_tokens if asked.has_content else 0,
            tokens_evaluated=result.prompt_tokens,
            model=asked.model,
            generation_settings={"n_ctx": asked.context, "n_predict": params.max_new_tokens or -1} | settings,
            prompt=self._tokenizer.decode(self._ids_of(index), skip_special_tokens=False),
            has_new_line="\n" in result.text,
            truncated=False,
            stop_type="word" if is_word else "eos" if result.finish_reason in ("eos", "stop") else "limit",
            stopping_word=str(word) if is_word else "",
            tokens_cached=result.prompt_tokens + result.generated_tokens,
            timings=_timings(result),
        )

    def _ids_of(self, index: int) -> Sequence[int]:
        return self._asked.prompt_ids[index // len(self._asked.params)]

    def _scored(self, logprobs: Sequence[TokenLogprob] | None, finish_reason: FinishReason | None) -> Any:
        if self._asked.params[0].logprobs is None:
            return UNSET
        return [
            LlamaProbability(
                each.token_id,
                **self._spelling.entry(each.token_id, each.logprob),
                top_logprobs=[{"id": top[0]} | self._spelling.entry(*top) for top in each.top],
            )
            for each in without_end(logprobs or (), finish_reason)
        ]


def _timings(result: GenerationResult) -> LlamaTimings:
    timing, num_read = result.timing, result.prompt_tokens - result.reused_tokens
    prompt = _rates(num_read, 1000 * timing.ttft_s)
    predicted = _rates(result.generated_tokens, 1000 * (timing.decode_time_s + timing.sampling_time_s))
    return LlamaTimings(result.reused_tokens, num_read, *prompt, result.generated_tokens, *predicted)


def _rates(count: int, milliseconds: float) -> tuple[float, float, float]:
    """Return the milliseconds, those per token, and the tokens per second."""
    per_token = milliseconds / count if count else 0.0
    return milliseconds, per_token, 1000 * count / milliseconds if milliseconds else 0.0


async def completion(request: Request, state: ServerState, body: CompletionBody) -> Response:
    answer_any_model(request, state, body.model)
    asked = await ask_to_complete(request, state, _settled(request, body))
    return await _answer(request, state, body, asked)


async def infill(request: Request, state: ServerState, body: InfillBody) -> Response:
    llm = answer_any_model(request, state, body.model)
    asked = ask_completion(_settled(request, body), llm.sampling_defaults)
    files = [(each.filename, each.text) for each in body.input_extra or ()]
    num_answer_tokens = asked.params[0].max_new_tokens or NUM_TOKENS_OF_CALLS
    room = llm.max_seq_len - min(num_answer_tokens, llm.max_seq_len // 2)

    def encode() -> list[int]:
        return llm.tokenizer.encode_infill(body.before, body.input_suffix, files, max_tokens=room)

    prompt = await prepared(request, state, encode, "input_prefix")
    return await _answer(request, state, body, between(asked, [prompt], llm.tokenizer))


def _settled(request: Request, body: _Body) -> _Body:
    """Return the body with a seed in place of -1, and with one token in place of none.

    A body that asks for no token has its prompt read into the cache. The seed is derived from the request's id, so that
    another process continues the answer with the same seed.
    """
    seed = seed_of(0, call_of(request).id) >> (64 - SEED_BITS) if body.seed == -1 else body.seed
    return replace_fields(body, seed=seed, max_tokens=body.max_tokens or 1)


async def _answer(request: Request, state: ServerState, body: CompletionBody | InfillBody, asked: Ask) -> Response:
    llm = state.llm().llm
    choices = await accept(request, state, asked)
    facts = LlamaAsked(
        call_of(request).model,
        choices.prompt_ids,
        asked.params,
        llm.max_seq_len,
        has_content=body.max_tokens != 0,
        has_tokens=bool(body.return_token_ids or body.stream),
    )
    return await reply(request, state, choices, LlamaShape(facts, llm.tokenizer), is_streamed=body.stream)


_post = partial(post, complete=complete_llamacpp, streams=True)
_ANSWER = LlamaCompletion | list[LlamaCompletion]
ROUTES = [
    _post("/completion", completion, "Continue a text", CompletionBody, _ANSWER, "text_completion"),
    _post("/infill", infill, "Write the text between two texts", InfillBody, LlamaCompletion, "text_completion"),
]
