"""The routes that generate answers and count prompts: one row for each, with the `Shape` of its protocol.

The body of any protocol is answered here: n choices per prompt, accepted before the headers are sent, and read
meanwhile.

A choice's index is its prompt's index times n, plus its number among the prompt's choices. The first choice of a prompt
reads the prompt. The others begin after its first piece, and find the prompt in the cache.
"""

import asyncio
import weakref
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any, final

from infer.engine.requests.ask import Ask
from infer.outputs import GenerationResult, Piece
from infer.request_limits import MAX_PRIORITY
from infer.serving.protocols.anthropic.ask import CountTokensBody
from infer.serving.protocols.anthropic.events import InputTokens, MessageShape
from infer.serving.protocols.api_errors import ENGINE_FAILED, NO_RETRY, ApiError
from infer.serving.protocols.bodies import Served, refusing
from infer.serving.protocols.events import Accepted, Delta, Output, Scores, Shape, event, with_warnings
from infer.serving.protocols.fields import Parameters, Reading
from infer.serving.protocols.llamacpp import ContinuationShape, InfillShape
from infer.serving.protocols.ollama import OllamaChatShape, OllamaGenerateShape
from infer.serving.protocols.openai.events import ChatShape, CompletionShape, StoredChats
from infer.serving.protocols.responses.events import ResponseInputTokens, ResponseShape
from infer.serving.server.connection import Call, SentPart, given_to
from infer.serving.server.door import Arrival
from infer.serving.server.endpoint import ApiRequest, ApiRoute, EventStream, get, json_response, post, text_tokens
from infer.serving.server.routes.tokens import count_prompt


@final
class Choices:
    """The answers to one body: n choices for each prompt.

    They begin, are read as deltas or as results, and are cancelled. Each is a `requests.answer.Answer`, which loads
    torch.
    """

    def __init__(self, request: ApiRequest, groups: Sequence[Sequence[Any]], *, is_answered: bool) -> None:
        self._call, self._state, self._is_answered = request.call, request.server, is_answered
        self._answers, self._size = list(chain.from_iterable(groups)), len(groups[0])  # choices, and those of a prompt
        self.firsts = [answers[0].sequence for answers in groups]  # of the first choice of each prompt
        self.cancel = weakref.finalize(self, _cancel, self._answers)  # called at the latest when nothing reads them
        self.cancel.atexit = False

    def begin(self) -> None:
        """Put the first choice of each prompt into the queue."""
        for index in range(0, len(self._answers), self._size) if self._is_answered else ():
            self._begin(index)

    def resume(self) -> None:
        """Give each choice the tokens of its answer that the client already has. May be called on any thread."""
        for index, answer in enumerate(self._answers):
            answer.sequence.resume(*given_to(index, self._call.sent))

    async def results(self) -> list[GenerationResult]:
        """Return the whole answers. Raises ApiError if one failed."""
        if not self._is_answered:
            return self._empty()
        try:
            found = await asyncio.gather(*map(self._results_of, range(0, len(self._answers), self._size)))
        except BaseException:
            self.cancel()
            raise
        return [self._checked(result) for group in found for result in group]

    async def deltas(self) -> AsyncGenerator[Delta, None]:
        """Yield the deltas of all choices when they arrive, each choice with its end.

        A choice that fails has no end. Its ApiError is raised when all other choices have ended.
        """
        if not self._is_answered:
            for index, result in enumerate(self._empty()):
                yield Delta(index, (), "", "", (), result)
            return
        failures = list[ApiError]()
        try:
            async with aclosing(self._read_all()) as read:
                async for index, pieces in read:
                    try:
                        delta = Delta.of(index, pieces) if pieces else await self._end(index)
                    except ApiError as error:
                        failures.append(ApiError.of(error, message=f"choice {index}: {error.message}"))
                    else:
                        yield delta
        finally:
            self.cancel()
        if failures:
            raise failures[0]

    async def _read_all(self) -> AsyncGenerator[tuple[int, list[Piece]], None]:
        """Yield the pieces of each choice, and an empty list at its end.

        The parts that the client already has are yielded first, divided as they were sent. The other choices of a
        prompt begin after its first choice has given something.
        """
        sent, size = self._call.sent, self._size
        for part in sent:
            answer = self._begin(part.choice)
            yield part.choice, [piece for _ in part.token_ids for piece in await answer.take_as_task(1)]
        if len(self._answers) == 1:  # it needs no tasks
            has_ended = bool(sent) and not sent[-1].token_ids
            while not has_ended:
                pieces = await self._answers[0].take_as_task()
                yield self._noted(0, pieces)
                has_ended = not pieces
            return
        has_given = {part.choice // size for part in sent}
        ended = {part.choice for part in sent if not part.token_ids}
        open_ones = [index for index in range(len(self._answers)) if index not in ended]
        reading = {self._read(index): index for index in open_ones if index % size == 0 or index // size in has_given}
        try:
            while reading:
                done, _ = await asyncio.wait(reading, return_when=asyncio.FIRST_COMPLETED)
                for task in sorted(done, key=reading.__getitem__):
                    index, pieces = reading.pop(task), task.result()
                    if index // size not in has_given:
                        has_given.add(index // size)
                        reading |= {self._read(other): other for other in range(index + 1, index + size)}
                    yield self._noted(index, pieces)
                    if pieces:
                        reading[self._read(index)] = index
        finally:
            for task in reading:
                task.cancel()
            await asyncio.gather(*reading, return_exceptions=True)

    def _noted(self, index: int, pieces: list[Piece]) -> tuple[int, list[Piece]]:
        """Return the part. Note it first if another process may have to continue the stream."""
        if self._call.is_noted:
            logprobs = tuple(piece.logprob for piece in pieces if piece.logprob is not None)
            self._call.notes.append(SentPart(index, [piece.token_id for piece in pieces], logprobs).note)
        return index, pieces

    async def _end(self, index: int) -> Delta:
        answer = self._answers[index]
        result = self._checked(await answer.result_as_task())
        known = Delta.of(index, answer.sequence.pieces)
        reasoning = (result.reasoning or "")[len(known.reasoning) :]
        return Delta(index, (), result.text[len(known.text) :], reasoning, (), result)

    def _checked(self, result: GenerationResult) -> GenerationResult:
        """Return the result. Raises ApiError if it failed, or if the server cancelled it other than for a timeout."""
        if result.finish_reason == "error":
            has_engine_failed = result.stop_reason == "internal" and self._state.has_engine_failed
            code, message = ENGINE_FAILED if has_engine_failed else None, result.error or "the answer failed"
            raise ApiError(500, message, code=code, headers=NO_RETRY)
        if result.finish_reason == "abort" and result.stop_reason != "timeout":
            self._state.llm()  # raises if the server is shutting down
            raise ApiError(500, "the answer was cancelled")
        return result

    def _empty(self) -> list[GenerationResult]:
        """Return one empty result per choice, for a body whose prompts are only checked."""
        results = [answer.sequence.result() for answer in self._answers]
        return [replace(each, finish_reason="length", stop_reason="max_tokens") for each in results]

    def _begin(self, index: int) -> Any:
        """Return the answer of a choice. Put it into the queue unless it has begun."""
        if (answer := self._answers[index]) not in self._call.answers:
            answer.begin()
            self._call.add(answer)
        return answer

    async def _results_of(self, first: int) -> list[GenerationResult]:
        """Return the results of the prompt whose first choice has index `first`."""
        indices = range(first, first + self._size)
        if self._size > 1:
            await self._answers[first].take_as_task()
            for index in indices:
                self._begin(index)
        return list(await asyncio.gather(*(self._answers[index].result_as_task() for index in indices)))

    def _read(self, index: int) -> "asyncio.Task[list[Piece]]":
        return asyncio.create_task(self._take(index))

    async def _take(self, index: int) -> list[Piece]:
        pieces: list[Piece] = await self._begin(index).take_as_task()
        return pieces


def _cancel(answers: Sequence[Any]) -> None:
    """Cancel the answers that have not ended."""
    for answer in answers:
        answer.cancel()


async def accept(request: ApiRequest, asked: Ask) -> Choices:
    """Prepare and check all prompts and put them into the queue. Raises ApiError if any prompt is refused."""
    call, host = request.call, request.server.host()
    await request.enter(_arrival(call.key_name, asked, host.model.max_seq_len))
    call.phase = "preparing"
    options = asked.options
    if key := call.key_name:  # each key has its own turns and its own cached prefixes
        options = replace(options, tenant=key, cache_salt=f"{key}\0{options.cache_salt}")
    if call.sent:  # its client has already waited
        options = replace(options, priority=MAX_PRIORITY)

    async def prepare() -> Choices:
        groups = list[list[Any]]()
        for number, prompt in enumerate(asked.prompts):
            with refusing(asked.prompt_name if len(asked.prompts) == 1 else f"{asked.prompt_name}[{number}]"):
                groups.append(await host.answers(replace(asked, prompts=[prompt], options=options)))
        choices = Choices(request, groups, is_answered=asked.is_answered)
        warnings = chain.from_iterable(sequence.request.warnings for sequence in choices.firsts)
        call.warnings[:] = dict.fromkeys((*call.warnings, *warnings))
        if call.sent:
            await host.loop.prepare(lambda check: choices.resume())
        choices.begin()
        return choices

    return await request.while_connected(prepare())


def _arrival(tenant: str, asked: Ask, context: int) -> Arrival:
    """Return the request's size. A prompt counts at most as many tokens as the context has."""
    of_tools = text_tokens(asked.options.tools)
    num_tokens = sum(min(context, of_tools + text_tokens(prompt)) for prompt in asked.prompts)
    if not asked.is_answered:  # prompts are only read, which needs no slot
        return Arrival(tenant, num_prompt_tokens=num_tokens, num_answer_tokens=0)
    return Arrival(tenant, len(asked.prompts), len(asked.params), num_tokens, asked.params[0].max_new_tokens)


def served_by(request: ApiRequest, body: Any) -> Served:
    """Return the model that answers a body, whatever model the body names."""
    llm, call = request.server.llm().llm, request.call
    request.check_model(body.model, is_any_taken=True)
    return Served(
        llm,
        id=call.id,
        model=call.model,
        created=call.created,
        load_seconds=call.load_seconds,
        seconds=lambda: call.seconds,
        reading=Reading(request.server.settings.unknown_fields, call.warnings),
        agent_prompts=request.server.settings.agent_prompts,
    )


async def answer_body(request: ApiRequest, body: Any, *, shape: type[Shape]) -> Any:
    """Answer a body with what its protocol asks and shows, whole or as a stream."""
    served = served_by(request, body)
    asked = body.ask(served)
    if isinstance(asked, Output):
        return json_response(asked)
    if not isinstance(asked, Ask):
        asked = await request.prepared(asked, "prompt")
    choices = await accept(request, asked)
    accepted = Accepted(served, asked, choices.firsts)
    scores = [await _scores_of(request, accepted.prompt_ids, num) for num in shape.scored(body)]
    shown = shape(accepted._replace(scores=scores), body)
    if shape.is_stream_by_default if body.stream is None else body.stream:
        events, seconds = _events(choices, shown, request.call), request.server.settings.comment_seconds
        return EventStream(events, comment_seconds=seconds, fail=shown.fail, media_type=shape.media_type)
    return shown.whole(await request.while_connected(choices.results()))


async def _scores_of(request: ApiRequest, prompts: Sequence[Sequence[int]], num: int | None) -> list[Scores]:
    """Return the log-probability of each token of each prompt, with the `num` likeliest tokens.

    If `num` is None, the scores are empty.
    """
    if num is None:
        return [() for _ in prompts]
    llm = request.server.llm()
    return [await request.while_connected(llm.prompt_logprobs(prompt, num=num)) for prompt in prompts]


async def _events(choices: Choices, shape: Shape, call: Call) -> AsyncGenerator[bytes, None]:
    results: dict[int, GenerationResult] = {}
    for chunk in shape.opening():
        yield event(chunk, shape.media_type)
    async with aclosing(choices.deltas()) as deltas:
        async for delta in deltas:
            for chunk in shape.chunks(delta):
                yield event(chunk if delta.result is None else with_warnings(chunk, call.warnings), shape.media_type)
            if delta.result is not None:
                results[delta.choice] = delta.result
    for chunk in shape.closing([*map(results.__getitem__, sorted(results))]):
        yield event(with_warnings(chunk, call.warnings), shape.media_type)
    if shape.last:
        yield shape.last


def answering(path: str, summary: str, shape: type[Shape], operation: str) -> ApiRoute:
    """Return the route of a body that asks for an answer, whole or streamed."""
    row = post(path, partial(answer_body, shape=shape), summary, shape.body, shape.answer, operation, streams=True)
    return row._replace(shape=shape)


def counting(path: str, shape: type[Shape], answer: Any, body: type[Parameters] | None = None) -> ApiRoute:
    """Return the route that counts the tokens of a conversation's prompt, of the shape's body or of another `body`."""

    async def count(request: ApiRequest, body: Any) -> Any:
        return answer(await count_prompt(request, body.ask(served_by(request, body))))

    body, summary = body or shape.body, "Count a conversation's tokens"
    return post(path, count, summary, body, answer, shape=shape)


async def list_chats(request: ApiRequest) -> StoredChats:
    return StoredChats([], None, None, False)


_TALK, _TEXT, _INFILL = "Answer a conversation", "Continue a text", "Write the text between two texts"
ROUTES = [
    answering("/v1/chat/completions", _TALK, ChatShape, "chat"),
    get("/v1/chat/completions", list_chats, "List the stored chats: none", answer=StoredChats),
    answering("/v1/completions", _TEXT, CompletionShape, "text_completion"),
    answering("/v1/responses", _TALK, ResponseShape, "chat"),
    counting("/v1/responses/input_tokens", ResponseShape, ResponseInputTokens),
    answering("/v1/messages", _TALK, MessageShape, "messages"),
    counting("/v1/messages/count_tokens", MessageShape, InputTokens, CountTokensBody),
    answering("/api/chat", _TALK, OllamaChatShape, "chat"),
    answering("/api/generate", "Answer a prompt", OllamaGenerateShape, "text_completion"),
    answering("/completion", _TEXT, ContinuationShape, "text_completion"),
    answering("/infill", _INFILL, InfillShape, "text_completion"),
]
