"""`AsyncLLM`: an `LLM` for programs with an event loop. It never blocks the loop."""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from contextlib import aclosing
from inspect import signature
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, Self, Unpack, final, overload

from torch import Tensor

from infer.compute.sampling.keywords import Params
from infer.engine.requests.answer import once
from infer.engine.requests.ask import Ask
from infer.engine.requests.host import Host
from infer.engine.requests.prompt_batch import Results, answer_all_as_task, check_batch_size, is_list_of_texts, pairs_of
from infer.engine.requests.prompt_encoding import Message, Prompt
from infer.engine.requests.stream import AsyncStream
from infer.engine.step.request import Request
from infer.engine.step.request_options import CALLBACK, RequestKeywords, RequestOptions
from infer.engine.step.scheduler import MAX_SECONDS
from infer.engine.texts import text_tasks
from infer.engine.texts.text_ids import Computed, VectorOptions
from infer.engine.texts.text_tasks import Result, TextOrPair, TextPair
from infer.engine.texts.token_trace import check_traceable, trace_answer
from infer.errors import InvalidRequestError
from infer.llm import LLM
from infer.outputs import Classification, GenerationResult, RankedDocument, SampleTrace, TokenLogprob
from infer.parameters import Count
from infer.sampling_params import SamplingParams

_Arguments = ParamSpec("_Arguments")


def _as_in(
    method: Callable[Concatenate[LLM, _Arguments], Result],
) -> Callable[
    [Callable[..., Coroutine[Any, Any, Result]]],
    Callable[Concatenate["AsyncLLM", _Arguments], Coroutine[Any, Any, Result]],
]:
    """Declare that a method has the arguments and the result of `method`, for the reader of its signature."""

    def declare(function: Any) -> Any:
        function.__signature__ = signature(method)
        return function

    return declare


@final
class AsyncLLM:
    """`LLM` for `await` and `async for`. Methods have the arguments and errors of the same methods of `LLM`.

    Answers of all tasks and loops run in the same steps, and each has the tokens that it would have alone. Requests are
    prepared in a few threads. If a task is cancelled or leaves a stream, its slot is freed after the current step.
    Loading takes seconds: `await asyncio.to_thread(AsyncLLM, "smollm2")` keeps the loop free meanwhile.

    Args:
        model: A model as for `LLM`, or a loaded `LLM`, which is then shared with other threads.
        settings: The other arguments of `LLM`.

    Raises:
        InferError: The errors of `LLM`.

    Examples:
        >>> async with AsyncLLM("smollm2") as model:
        ...     result = await model.generate("The capital of France is", temperature=0, max_new_tokens=2)
        >>> result.text
        ' Paris.'
    """

    def __init__(self, model: LLM | str | Path = "smollm2", **settings: Any) -> None:
        self.llm = model if isinstance(model, LLM) else LLM(model, **settings)
        if (engine := self.host.engine_if_any) is not None:
            # A later request then waits only for a short step.
            self.host.loop.call(once(engine.scheduler.limit_prompts, MAX_SECONDS))

    def __repr__(self) -> str:
        return f"Async{self.llm!r}"

    async def __aenter__(self) -> Self:
        self.llm.__enter__()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the model as `LLM.close` does. Active answers end with finish_reason "abort".

        Examples:
            >>> model = AsyncLLM("smollm2")
            >>> await model.close()
        """
        await asyncio.to_thread(self.llm.close)

    @overload
    async def generate(
        self,
        prompt: list[str] | tuple[str, ...],
        params: Params | Sequence[Params] | None = None,
        *,
        options: RequestOptions | None = None,
        **keywords: Unpack[RequestKeywords],
    ) -> list[GenerationResult]: ...

    @overload
    async def generate(
        self,
        prompt: Prompt,
        params: Params | None = None,
        *,
        options: RequestOptions | None = None,
        **keywords: Unpack[RequestKeywords],
    ) -> GenerationResult: ...

    async def generate(
        self,
        prompt: Any,
        params: Any = None,
        *,
        options: RequestOptions | None = None,
        **keywords: Unpack[RequestKeywords],
    ) -> GenerationResult | list[GenerationResult]:
        """Return the whole answer, or a list of answers for a list of texts. See `LLM.generate`.

        Examples:
            >>> model = AsyncLLM(llm)
            >>> one, two = await asyncio.gather(
            ...     model.generate("Once upon a time", temperature=0, max_new_tokens=4),
            ...     model.generate("The capital of France is", temperature=0, max_new_tokens=4),
            ... )
            >>> two.text
            ' Paris.\\n\\n'
        """
        if is_list_of_texts(prompt):
            return await self.generate_all(prompt, params, options=options, **keywords)
        return await self.stream(prompt, params, options=options, **keywords).result()

    def stream(
        self,
        prompt: Prompt,
        params: Params | None = None,
        *,
        options: RequestOptions | None = None,
        **keywords: Unpack[RequestKeywords],
    ) -> AsyncStream:
        """Return a stream that yields pieces as they arrive. See `LLM.stream` for the arguments.

        Examples:
            >>> model = AsyncLLM(llm)
            >>> async for piece in model.stream("The capital of France is", temperature=0, max_new_tokens=2):
            ...     print(repr(piece.text))
            ' Paris'
            '.'
        """
        return self.host.astream(Ask.of(prompt, params, options, keywords))

    async def chat(
        self,
        messages: Sequence[Message],
        params: Params | None = None,
        *,
        options: RequestOptions | None = None,
        **keywords: Any,
    ) -> GenerationResult:
        """Return the answer to a conversation. See `LLM.chat`.

        Examples:
            >>> model = AsyncLLM(llm)
            >>> messages = [{"role": "user", "content": "What is the capital of France?"}]
            >>> (await model.chat(messages)).text
            'The capital of France is Paris.'
        """
        return await self.stream_chat(messages, params, options=options, **keywords).result()

    def stream_chat(
        self,
        messages: Sequence[Message],
        params: Params | None = None,
        *,
        options: RequestOptions | None = None,
        **keywords: Any,
    ) -> AsyncStream:
        """Return a stream of the answer that `chat` would return. See `LLM.chat` for the arguments.

        Examples:
            >>> model = AsyncLLM(llm)
            >>> messages = [{"role": "user", "content": "What is the capital of France?"}]
            >>> stream = model.stream_chat(messages)
            >>> "".join([piece.text async for piece in stream])
            'The capital of France is Paris.'
        """
        return self.host.astream(Ask.of(messages, params, options, keywords, has_variables=True))

    async def choices(
        self,
        prompt: Prompt,
        params: Sequence[SamplingParams],
        *,
        options: RequestOptions | None = None,
        **variables: Any,
    ) -> list[AsyncStream]:
        """Return several streams of answers to one prompt, which is rendered and tokenised once.

        A stream computes nothing before it is read or its `begin` is awaited.

        Args:
            prompt: A text, token ids, or messages.
            params: The sampling of each answer.
            options: Options of all answers.
            variables: Variables of the chat template, if the prompt is messages.

        Raises:
            InvalidRequestError: A part of the request is refused.
            ClosedError: The model is closed.

        Examples:
            >>> model = AsyncLLM(llm)
            >>> params = [SamplingParams(seed=seed, max_new_tokens=4) for seed in (1, 2)]
            >>> streams = await model.choices("My name is", params)
            >>> [(await stream.result()).text for stream in streams]
            [' Cech and this', ' Garraf with powerful']
        """
        if not params:
            raise InvalidRequestError("params must have the sampling of at least one answer")
        ask = Ask([prompt], params, options or RequestOptions(), variables=variables)
        return [AsyncStream.of(answer) for answer in await self.host.answers(ask)]

    @_as_in(LLM.prompt_logprobs)
    async def prompt_logprobs(self, *given: Any, **keywords: Any) -> list[TokenLogprob | None]:
        """Return the log-probability of each token of a prompt. See `LLM.prompt_logprobs`.

        Examples:
            >>> model = AsyncLLM(llm)
            >>> first, second, *rest = await model.prompt_logprobs("The capital of France is Paris.")
            >>> first is None, second.rank
            (True, 2923)
        """
        return await text_tasks.prompt_logprobs(self.host, *given, **keywords).run_as_task()

    @_as_in(LLM.generate_all)
    async def generate_all(self, *given: Any, **keywords: Any) -> list[GenerationResult]:
        """Return the answers to several prompts, in their order. See `LLM.generate_all`.

        The callbacks are called on the event loop.

        Examples:
            >>> model = AsyncLLM(llm)
            >>> results = await model.generate_all(["One, two,", "Red, green,"], temperature=0, max_new_tokens=3)
            >>> [result.text for result in results]
            [' or three-', ' and blue are']
        """
        bound = signature(LLM.generate_all).bind(self.llm, *given, **keywords)
        bound.apply_defaults()
        batch = bound.arguments
        CALLBACK.check("on_result", batch["on_result"])
        host = self.host
        check_batch_size(host, batch["batch_size"])
        ask = Ask.of((), None, batch["options"], batch["keywords"])
        pairs = pairs_of(batch["prompts"], batch["params"])
        requests = await host.loop.prepare(lambda check: list(host.requests.numbered(pairs, ask, check=check)))
        results = Results(len(requests), batch["on_progress"], batch["on_result"])
        async with aclosing(answer_all_as_task(host.loop, requests, batch["batch_size"])) as answers:
            async for ended in answers:
                results.add(*ended)
        return [results.by_number[number] for number, _ in requests]

    @_as_in(LLM.embed)
    async def embed(self, texts: Any, pooling: Any = None, **keywords: Any) -> Tensor:
        """Return one vector per text. See `LLM.embed`. Calls of several tasks run one after the other.

        Examples:
            >>> model = AsyncLLM(llm)
            >>> (await model.embed(["Cats sleep."])).shape
            torch.Size([1, 576])
        """
        return await text_tasks.embed(self.host, texts, VectorOptions(pooling, **keywords)).run_as_task()

    async def compute_vectors(self, texts: Sequence[Prompt], options: VectorOptions) -> Computed:
        """Return the vectors of `embed` with their texts' ids, for servers, without warnings. See `LLM.embed`."""
        return await text_tasks.embed(self.host, texts, options).compute()

    @_as_in(LLM.rerank)
    async def rerank(self, *given: Any, **keywords: Any) -> list[RankedDocument]:
        """Return documents by their relevance to a query. See `LLM.rerank`.

        Examples:
            >>> async with AsyncLLM("smollm2", reranker="qwen3") as model:
            ...     best = await model.rerank("where do cats sleep?", ["In 1932.", "Cats sleep on roofs."], top_n=1)
            >>> best[0].document
            'Cats sleep on roofs.'
        """
        return await text_tasks.rerank(self.host, *given, **keywords).run_as_task()

    async def score_pairs(
        self,
        pairs: Sequence[TextPair],
        instruction: str | None = None,
        *,
        truncate: bool = False,
        may_compare: bool = False,
        is_raw: bool = False,
    ) -> Computed:
        """Return the score of each query and document with the texts' ids, for servers. See `LLM.rerank`.

        With `may_compare`, a model that was not made for scores or embeddings compares its vectors. With `is_raw`, a
        reranker's scores are logits.
        """
        task = text_tasks.score_pairs(
            self.host, pairs, instruction, truncate=truncate, may_compare=may_compare, is_raw=is_raw
        )
        return await task.compute()

    @_as_in(LLM.classify)
    async def classify(self, *given: Any, **keywords: Any) -> list[Classification]:
        """Return the labels of each text with their probabilities, the most probable first. See `LLM.classify`.

        Examples:
            >>> model = AsyncLLM("path/to/classifier")  # doctest: +SKIP
            >>> (await model.classify(["The food was cold."]))[0].label  # doctest: +SKIP
            'negative'
        """
        return await text_tasks.labels(self.host, *given, **keywords).run_as_task()

    async def compute_labels(self, texts: Sequence[TextOrPair], *, truncate: bool = False) -> Computed:
        """Return the values of all labels per text, in the labels' order, with the texts' ids. See `LLM.classify`."""
        return await text_tasks.classify(self.host, texts, truncate=truncate).compute()

    async def trace(
        self,
        prompt: Prompt,
        params: Params | None = None,
        *,
        num_candidates: int = 10,
        options: RequestOptions | None = None,
        **keywords: Unpack[RequestKeywords],
    ) -> tuple[GenerationResult, list[SampleTrace]]:
        """Return an answer, and the trace of each of its tokens. See `LLM.sample_trace`.

        Returns:
            The result, and one trace per token. A trace has no `text_before`.

        Examples:
            >>> model = AsyncLLM(llm)
            >>> result, traces = await model.trace("The capital of France is", {"temperature": 0, "max_new_tokens": 2})
            >>> [trace.chosen.text for trace in traces]
            [' Paris', '.']
        """
        host, ask = self.host, Ask.of(prompt, params, options, keywords)
        Count(1, host.requests.limits.vocab_size).check("num_candidates", num_candidates)
        check_traceable(host)
        stream = host.astream(ask)
        result, request = await stream.result(), stream.sequence.request
        first = 1 + len(ask.options.answer_prefix)
        traces = await self.trace_answer(request, result.token_ids, first=first, num_candidates=num_candidates)
        return result, traces

    async def trace_answer(
        self,
        request: Request,
        answer: Sequence[int],
        *,
        first: int = 1,
        last: int | None = None,
        num_candidates: int = 10,
        is_given: bool = False,
    ) -> list[SampleTrace]:
        """Return how each token of an answer was sampled.

        Args:
            request: The request that was answered.
            answer: The ids of the answer.
            first: The first step to trace; 1 follows the prompt.
            last: The last step to trace. None: the end of the answer.
            num_candidates: Number of candidate tokens per trace.
            is_given: True if the tokens may differ from the sampled ones.

        Raises:
            InvalidRequestError: An argument breaks a rule, or a token is not the sampled one.
            ClosedError: The model is closed.
        """
        host = self.host
        check_traceable(host)
        work = trace_answer(
            host, request, answer, first=first, last=last, num_candidates=num_candidates, is_given=is_given
        )
        return await host.loop.call_as_task(work)

    @property
    def host(self) -> Host:
        """The loaded model and its engine, as `LLM.host`. Raises ClosedError after `close`."""
        return self.llm.host
