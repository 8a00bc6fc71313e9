"""`LLM`: a model, its tokenizer and its cache, with the calls that most programs need."""

import gc
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import fields
from inspect import Parameter, signature
from pathlib import Path
from typing import Any, NoReturn, ParamSpec, Self, SupportsIndex, TypedDict, Unpack, final, get_type_hints, overload

import torch

from infer.compute.operands.architecture import Architecture
from infer.compute.sampling.keywords import Params, default_params
from infer.engine.requests.ask import Ask
from infer.engine.requests.host import Host, load_host
from infer.engine.requests.prompt_batch import (
    BATCH_SIZE,
    Ended,
    OnResult,
    Results,
    answer_all,
    begun,
    check_batch_size,
    is_list_of_texts,
    pairs_as_needed,
    pairs_of,
)
from infer.engine.requests.prompt_encoding import Message, Prompt
from infer.engine.requests.request_maker import OnError
from infer.engine.requests.stream import AsyncStream, OnPrefill, OnToken, Stream
from infer.engine.session.session import Session, begin_session
from infer.engine.step.request_options import CALLBACK, RequestKeywords, RequestOptions
from infer.errors import InvalidRequestError, closed
from infer.files import open_checkpoint
from infer.model_settings import (
    DeviceName,
    DtypeName,
    EvictionPolicy,
    GrammarBackend,
    KVType,
    ModelSettings,
    PrecisionName,
    RerankerName,
    WeightsType,
)
from infer.models.catalog.models_at_hand import shown_as, weights_name
from infer.models.from_checkpoint import load_model, load_tokenizer, set_num_threads, threads_if_loaded
from infer.models.load import OnProgress
from infer.models.transformer import Transformer
from infer.outputs import GenerationResult
from infer.sampling_params import SamplingParams
from infer.system.available_memory import give_back_freed
from infer.text.tokenizer import Tokenizer
from infer.text.toolcalls.tools import ToolLike
from infer.text_calls import TextCalls

__all__ = ["LLM", "load_model", "load_tokenizer", "set_num_threads"]

_P = ParamSpec("_P")


class _ModelKeywords(TypedDict, total=False):
    """The keywords of `LLM` that are fields of `ModelSettings`."""

    threads: int | None
    precision: PrecisionName
    weights: WeightsType
    dtype: DtypeName | torch.dtype
    reuse_prefixes: bool
    kv_type: KVType
    eviction_policy: EvictionPolicy
    eviction_window: int
    protected_prefix: int
    memory_threshold_mb: int | None
    state_memory_mb: int | None
    draft_model: str | Path | None
    draft_head: bool
    max_seq_len: int | None
    grammar_backend: GrammarBackend
    tensor_parallel: int
    capture: bool
    chat_template: str | None
    allow_special: bool
    device: DeviceName | str | torch.device
    reranker: RerankerName
    pool_pages: int | None
    prefix_disk: int | str | None
    experts_memory: int | str | None


def _shows_settings(init: Callable[_P, None]) -> Callable[_P, None]:
    """Give a constructor the signature that help() shows: its own arguments, and those of `_ModelKeywords`."""
    shown, types = signature(init), get_type_hints(_ModelKeywords)
    own = [each for each in shown.parameters.values() if each.kind is not Parameter.VAR_KEYWORD]
    keywords = [
        Parameter(each.name, Parameter.KEYWORD_ONLY, default=each.default, annotation=types[each.name])
        for each in fields(ModelSettings)
    ]
    vars(init)["__signature__"] = shown.replace(parameters=[*own, *keywords])
    return init


@final
class LLM(TextCalls):
    """A loaded model with its tokenizer and cache. All methods are safe to call from several threads.

    Args:
        model: A folder, a `.gguf` file, an installed package (`smollm2`), or a name on the hub (`org/repo:Q4_K_M`).
        device: "cpu", "cuda", "opencl", or "auto"; "cuda:1" and "opencl:NAME" choose one of several.
            "cuda:0,1" shares the model among GPUs.
        dtype: "auto" keeps the weights in their file's format. A float type dequantises them at load.
        weights: "q8" or "q4" quantises float weights at load, "bf16" rounds them.
        precision: Precision of activations for quantised weights on a CPU: "exact" (16 bits) or "fast" (8 bits).
            With `fast`, weights in BF16 are multiplied by activations in BF16 if the CPU has AVX512-BF16.
        draft_model: A smaller model with the same vocabulary, which drafts tokens that this model verifies. Answers
            have the same tokens, and are faster if drafts are often right. Drafts that take more time than they save
            are not made.
        draft_head: False leaves out the model's own head that drafts tokens (multi-token prediction). True loads it if
            its files have one, on a CPU, in one process, without a `draft_model`, and if it fits in memory.
        max_seq_len: Number of tokens of the context. None: the model's own, but at most 8,192.
        kv_type: This argument and those up to `state_memory_mb` are fields of `CacheSettings`.
        prefix_disk: Limit of the files in the user's cache folder that store the beginnings of prompts for later
            processes: bytes, or a size such as "8GB". Includes `reuse_prefixes`. None: nothing is stored.
        pool_pages: Number of pages of 64 tokens that all answers and sessions share. None: enough for 8 full contexts,
            or as many as fit in memory; with CUDA, all that fit.
        experts_memory: Memory for a model's experts on a CPU, in bytes or as "6GB". The others are read from a file in
            the user's cache folder when a token needs them, with the same answers. None: all are in memory if
            they fit.
        grammar_backend: Library that constrains answers to a schema, a pattern or a grammar.
        threads: Number of threads of the process, or of each process if `tensor_parallel` processes share the model.
        capture: False runs each op separately: slower, with the same tokens.
        chat_template: Template that replaces the model's own.
        allow_special: True if control tokens in the text of a message are control tokens, not text.
        reranker: "qwen3" makes a reranker of a copy of Qwen3-Reranker. "auto" uses the model's files and its name.
        on_progress: Called with the number of loaded blocks and the number of all blocks.

    Raises:
        InvalidRequestError: An argument breaks a rule, or there is no such model.
        ModelError: The model cannot be used, or does not fit in memory.

    Examples:
        >>> with LLM("smollm2") as other:  # frees the memory at its end, as close() does
        ...     print(other.generate("The capital of France is", temperature=0, max_new_tokens=2).text)
         Paris.
    """

    _host: Host | None

    @_shows_settings
    def __init__(
        self,
        model: str | Path = "smollm2",
        *,
        on_progress: OnProgress | None = None,
        **settings: Unpack[_ModelKeywords],
    ) -> None:
        self._host, self._shown = None, str(model)
        CALLBACK.check("on_progress", on_progress)
        asked = ModelSettings.of(settings)
        if asked.unused is not None:
            warnings.warn(asked.unused, stacklevel=2)
        with threads_if_loaded(asked.threads, asked.tensor_parallel):
            checkpoint = open_checkpoint(model)
            tokenizer = load_tokenizer(checkpoint, chat_template=asked.chat_template, allow_special=asked.allow_special)
            forms = asked.dtype, asked.weights, weights_name(checkpoint.metadata, checkpoint.tensors)
            checkpoint = checkpoint.without_metadata()
            self._host = host = load_host(checkpoint, tokenizer, asked, on_progress)
        self.sampling_defaults = host.facts.sampling_defaults
        self._shown = shown_as(model, checkpoint, host.model.architecture, forms, host.model.max_seq_len)
        self._host.warn_of_template(stacklevel=3)

    def __repr__(self) -> str:
        return f"LLM({self._shown}{', closed' if self._host is None else ''})"

    def __enter__(self) -> Self:
        self.host.loop.check_open()
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise TypeError("an LLM cannot be copied or pickled: load it again, with LLM(...)")

    def close(self) -> None:
        """Free the memory of the weights and the caches. Any thread may call it; a second call does nothing.

        Active answers end with finish_reason "abort", sessions are closed, and every later call raises ClosedError.

        Examples:
            >>> other = LLM("smollm2")
            >>> other.close()
        """
        if self._host is not None:
            self._host.close()
            self._host = None
            gc.collect()
            give_back_freed()

    def trim(self) -> int:
        """Return unused memory to the system.

        Idle sessions lose their cached tokens, and compute them again with their next answer.

        Returns:
            The number of bytes freed from the cache.

        Raises:
            ClosedError: The model is closed.

        Examples:
            >>> llm.trim() >= 0  # bytes
            True
        """
        host = self.host
        return host.loop.run(host.engine.trim)

    @property
    def host(self) -> Host:
        """The loaded model with its engine, for servers. Raises ClosedError after `close`."""
        if (host := self._host) is None:
            raise closed()
        host.loop.check_open()
        return host

    @property
    def model(self) -> Transformer:
        """The network. Raises ClosedError after `close`, like all members except `repr`."""
        return self.host.model

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the model."""
        return self.host.tokenizer

    @property
    def architecture(self) -> Architecture:
        """The network's layers and sizes."""
        return self.model.architecture

    @property
    def max_seq_len(self) -> int:
        """Number of tokens of the context."""
        return self.model.max_seq_len

    @property
    def can_chat(self) -> bool:
        """True if the model has a chat template."""
        return self.tokenizer.chat_template is not None

    @property
    def prompt_names(self) -> tuple[str, ...]:
        """Names of the prompts that the model's files have for `embed`."""
        return tuple(self.host.facts.heads.prompts.by_name)

    @property
    def system_fingerprint(self) -> str:
        """Digest of weights, tokenizer, template and settings.

        If two fingerprints are equal, answers to the same request are equal.
        """
        return self.host.system_fingerprint

    def default_params(self, *, is_chat: bool = False) -> SamplingParams:
        """Return the parameters of a call without params.

        They are the model's own values, and neutral values for all others.

        Args:
            is_chat: True for the values of a chat.

        Examples:
            >>> llm.default_params(is_chat=True)
            SamplingParams(temperature=0.0, top_p=0.9, repetition_penalty=1.1, repetition_window=64, max_new_tokens=512)
        """
        return default_params(self.sampling_defaults, {}, is_chat=is_chat)

    @overload
    def generate(
        self,
        prompt: list[str] | tuple[str, ...],
        params: Params | Sequence[Params] | None = None,
        *,
        options: RequestOptions | None = None,
        **keywords: Unpack[RequestKeywords],
    ) -> list[GenerationResult]: ...

    @overload
    def generate(
        self,
        prompt: Prompt,
        params: Params | None = None,
        *,
        on_token: OnToken | None = None,
        on_prefill: OnPrefill | None = None,
        options: RequestOptions | None = None,
        **keywords: Unpack[RequestKeywords],
    ) -> GenerationResult: ...

    def generate(
        self,
        prompt: Any,
        params: Any = None,
        *,
        on_token: OnToken | None = None,
        on_prefill: OnPrefill | None = None,
        options: RequestOptions | None = None,
        **keywords: Unpack[RequestKeywords],
    ) -> GenerationResult | list[GenerationResult]:
        """Return the whole answer to a prompt.

        Args:
            prompt: A text, token ids, or messages. For a list of texts, the result is a list as `generate_all` returns
                it.
            params: `SamplingParams`, which are used exactly, or a mapping of fields over the model's defaults. None:
                `default_params`, for messages those of a chat.
            on_token: Called as `on_token(token_id, text)` with each token as it arrives. Returns False to cancel the
                answer. For one prompt only.
            on_prefill: Called as in `stream`. For one prompt only.
            options: Options of the request besides its sampling. None: the default options.
            keywords: Keywords of `stream`.

        Returns:
            The result. A cancelled answer, by `on_token` or by `cancel` from another thread, has finish_reason "abort".

        Raises:
            InvalidRequestError: An argument breaks a rule, or the prompt does not fit the context.
            ClosedError: The model is closed.

        Examples:
            >>> llm.generate("The capital of France is", temperature=0, max_new_tokens=2).text
            ' Paris.'
        """
        CALLBACK.check("on_token", on_token)
        if not is_list_of_texts(prompt):
            return self.stream(prompt, params, on_prefill=on_prefill, options=options, **keywords).run(on_token)
        if on_token is not None or on_prefill is not None:
            raise InvalidRequestError("on_token and on_prefill are for one prompt, got a list: see generate_all()")
        return self.generate_all(prompt, params, options=options, **keywords)

    def stream(
        self,
        prompt: Prompt,
        params: Params | None = None,
        *,
        on_prefill: OnPrefill | None = None,
        options: RequestOptions | None = None,
        **keywords: Unpack[RequestKeywords],
    ) -> Stream:
        """Return a stream that yields pieces of text as they arrive.

        Args:
            prompt: A text, token ids, or messages.
            params: As for `generate`.
            on_prefill: Called as `on_prefill(done, total)` after each chunk of `prefill_chunk` prompt tokens. `cancel`
                is checked then, too.
            options: Options of the request besides its sampling. None: the default options.
            keywords: Fields of `SamplingParams` and of `RequestOptions`. `speculation="ngram"` drafts up to
                `num_draft_tokens` tokens and verifies them in one step. The tokens stay the same, and arrive sooner if
                the text repeats. With `overflow="truncate_left"`, a prompt that is too long loses its beginning, so
                that the answer has enough room (`prompt_encoding.fitted`).

        Returns:
            The stream. Its `.result` is available after the last piece.

        Raises:
            InvalidRequestError: An argument breaks a rule, or the prompt does not fit the context.
            ClosedError: The model is closed.

        Examples:
            >>> for piece in llm.stream("The capital of France is", temperature=0, max_new_tokens=2):
            ...     print(repr(piece.text))
            ' Paris'
            '.'
        """
        host, ask = self.host, Ask.of(prompt, params, options, keywords)
        return host.loop.stream(host.requests.sequence(ask), on_prefill)

    def astream(self, prompt: Prompt, params: Params | None = None, **keywords: Any) -> AsyncStream:
        """Return a stream for `async for`, as `AsyncLLM.stream` does.

        Args:
            prompt: A text, token ids, or messages.
            params: As for `generate`.
            keywords: `options`, and the keywords of `stream`.

        Raises:
            ClosedError: The model is closed.

        Examples:
            >>> async for piece in llm.astream("The capital of France is", temperature=0, max_new_tokens=2):
            ...     print(repr(piece.text))
            ' Paris'
            '.'
        """
        return self.host.astream(Ask.of(prompt, params, keywords.pop("options", None), keywords))

    def generate_all(
        self,
        prompts: Sequence[Prompt],
        params: Params | Sequence[Params] | None = None,
        *,
        batch_size: int = BATCH_SIZE,
        on_progress: Callable[[int, int], None] = lambda done, total: None,
        on_result: OnResult | None = None,
        options: RequestOptions | None = None,
        **keywords: Unpack[RequestKeywords],
    ) -> list[GenerationResult]:
        """Return the answers to several prompts, in their order.

        Each equals the answer of `generate` for its prompt and parameters. When an answer ends, the next one begins.

        Args:
            prompts: The prompts. All are checked before the first answer begins.
            params: The same for all prompts, or a list with one per prompt.
            batch_size: Number of answers that are computed together, at most 64 on a CPU and 512 on a GPU.
            on_progress: Called with the number of finished answers and the number of all answers.
            on_result: Called as `on_result(index, result)` when an answer ends.
            options: Options of the request besides its sampling. None: the default options.
            keywords: Fields of `SamplingParams` and of `RequestOptions`. Sampling fields exclude `params`.

        Raises:
            InvalidRequestError: An argument breaks a rule, or the prompt does not fit the context.
            ClosedError: The model is closed.

        Examples:
            >>> results = llm.generate_all(["One, two,", "Red, green,"], temperature=0, max_new_tokens=3)
            >>> [result.text for result in results]
            [' or three-', ' and blue are']
        """
        host = self.host
        check_batch_size(host, batch_size)
        requests = list(host.requests.numbered(pairs_of(prompts, params), Ask.of((), None, options, keywords)))
        results = Results(len(requests), on_progress, on_result)
        for ended in answer_all(host.loop, begun(requests), batch_size):
            results.add(*ended)
        return [results.by_number[number] for number, _ in requests]

    def generate_iter(
        self,
        prompts: Iterable[Prompt],
        params: Params | Iterable[Params] | None = None,
        *,
        batch_size: int = BATCH_SIZE,
        on_error: OnError | None = None,
        options: RequestOptions | None = None,
        **keywords: Unpack[RequestKeywords],
    ) -> Iterator[Ended]:
        """Yield `(index, result)` of each answer as it ends, for any number of prompts.

        Prompts are taken and checked when needed: up to `batch_size` wait for active answers to end. Leaving the loop
        ends all active answers.

        Args:
            prompts: The prompts.
            params: The same for all prompts, or a list with one per prompt.
            batch_size: Number of answers that are computed together, at most 64 on a CPU and 512 on a GPU.
            on_error: Called as `on_error(index, error)` for a refused prompt. The other answers then continue.
            options: Options of the request besides its sampling. None: the default options.
            keywords: Fields of `SamplingParams` and of `RequestOptions`. Sampling fields exclude `params`.

        Raises:
            InvalidRequestError: An argument breaks a rule, or the prompt does not fit the context.
            ClosedError: The model is closed.

        Examples:
            >>> answers = llm.generate_iter(["One, two,", "Red, green,"], temperature=0, max_new_tokens=3)
            >>> dict((index, result.text) for index, result in answers)
            {0: ' or three-', 1: ' and blue are'}
        """
        CALLBACK.check("on_error", on_error)
        host = self.host
        check_batch_size(host, batch_size)
        ask = Ask.of((), None, options, keywords)
        requests = host.requests.numbered(pairs_as_needed(prompts, params), ask, on_error)
        return answer_all(host.loop, begun(requests), batch_size)

    def chat(
        self,
        messages: Sequence[Message],
        params: Params | None = None,
        *,
        on_token: OnToken | None = None,
        on_prefill: OnPrefill | None = None,
        options: RequestOptions | None = None,
        **keywords: Any,
    ) -> GenerationResult:
        """Answer a conversation, rendered by the model's own template.

        Args:
            messages: The messages of the conversation.
            params: As for `generate`.
            on_token: Called as in `generate`.
            on_prefill: Called as in `stream`.
            options: Options of the request besides its sampling. None: the default options.
            keywords: Keywords of `stream` and of `Tokenizer.encode_chat`, including variables of the template.

        Raises:
            InvalidRequestError: An argument breaks a rule, or the prompt does not fit the context.
            ClosedError: The model is closed.

        Examples:
            >>> llm.chat([{"role": "user", "content": "What is the capital of France?"}]).text
            'The capital of France is Paris.'
        """
        CALLBACK.check("on_token", on_token)
        return self.stream_chat(messages, params, on_prefill=on_prefill, options=options, **keywords).run(on_token)

    def stream_chat(
        self,
        messages: Sequence[Message],
        params: Params | None = None,
        *,
        on_prefill: OnPrefill | None = None,
        options: RequestOptions | None = None,
        **keywords: Any,
    ) -> Stream:
        """Return a stream of the answer that `chat` would return. See `chat` for the arguments.

        Examples:
            >>> messages = [{"role": "user", "content": "What is the capital of France?"}]
            >>> "".join(piece.text for piece in llm.stream_chat(messages))
            'The capital of France is Paris.'
        """
        host, ask = self.host, Ask.of(messages, params, options, keywords, has_variables=True)
        return host.loop.stream(host.requests.sequence(ask), on_prefill)

    def session(
        self, *, system: str | None = None, tools: Sequence[ToolLike] | None = None, **template_variables: Any
    ) -> Session:
        """Return a session: many turns over one cache.

        Args:
            system: The system message.
            tools: Functions or schemas that an answer may call. Their results are messages with role "tool".
            template_variables: Variables that are passed to the chat template of every turn.

        Raises:
            ClosedError: The model is closed.

        Examples:
            >>> with llm.session() as session:
            ...     answers = [session.send(text).text for text in ("What is the capital of France?", "And of Italy?")]
            >>> answers
            ['The capital of France is Paris.', 'The capital of Italy is Rome.']
        """
        return begin_session(self.host, system, tools, template_variables)

    def load_session(self, path: str | Path) -> Session:
        """Return a session that `Session.save` wrote, in this process or in another one with the same model.

        Args:
            path: The file of the session.

        Raises:
            ClosedError: The model is closed.

        Examples:
            >>> session = llm.session()
            >>> answer = session.send("What is the capital of France?")
            >>> session.save("talk.safetensors")
            >>> llm.load_session("talk.safetensors").send("And of Italy?").text
            'The capital of Italy is Rome.'
        """
        session = self.session()
        session.load(path)
        return session
