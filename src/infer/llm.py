"""`LLM`: a model, its tokenizer and its cache, with the few calls that most programs need."""

import gc
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, Self, SupportsIndex, Unpack, final, overload

import torch
from jaxtyping import Float
from torch import Tensor

from infer.catalog.models import shown_as, weights_name
from infer.checkpoint import open_checkpoint
from infer.checkpoint.generation_config import defaults_of
from infer.checkpoint.pooling import Pooling
from infer.engine.batch import BATCH_SIZE, Ended, OnResult, answer_all, begun, check_batch_size, results_of
from infer.engine.embedding import embed, texts_to_embed
from infer.engine.host import Host, HostSettings, OnError
from infer.engine.loop import Loop
from infer.engine.model_settings import (
    DeviceName,
    DtypeName,
    EvictionPolicy,
    GrammarBackend,
    KVType,
    PrecisionName,
    WeightsType,
    checks_settings,
)
from infer.engine.prompt_ids import Message, Prompt, is_list_of_texts, pairs_as_needed, pairs_of
from infer.engine.request_options import RequestKeywords, RequestOptions, check_callback, split_options
from infer.engine.stream import AsyncStream, OnPrefill, OnToken, Stream
from infer.engine.token_trace import ids_to_score, logits_of, score_prompt, trace_token
from infer.errors import InvalidRequestError
from infer.kvcache.settings import CacheSettings
from infer.model.from_checkpoint import (
    dtype_name,
    load_checked,
    load_model,
    load_tokenizer,
    set_num_threads,
    threads_if_loaded,
)
from infer.model.load import OnProgress
from infer.model.transformer import Transformer
from infer.operands.architecture import Architecture
from infer.outputs import GenerationResult, SampleTrace, TokenLogprob
from infer.runner.closing import closed
from infer.sampling.defaults import default_params
from infer.sampling.keywords import Params
from infer.sampling_params import SamplingParams
from infer.session.session import Session, begin_session
from infer.system.available_memory import give_back_freed
from infer.tensor_parallel.ranks import start_ranks
from infer.tokenizer import Tokenizer
from infer.tokenizer.template_process import start_rendering
from infer.toolcalls.tools import ToolLike

__all__ = ["LLM", "load_model", "load_tokenizer", "set_num_threads"]


@final
class LLM:
    """A loaded model. `model` is a folder, a `.gguf` file, the name of an installed package (`smollm2`) or one on the
    hub (`org/repo`, `org/repo:Q4_K_M`: `checkpoint.hub`).

    `dtype="auto"` keeps the weights as their file stores them; a float type dequantises them at load. `weights="q8"` or
    `"q4"` quantises float weights at load, `"bf16"` rounds them. `precision` is that of the activations beside
    quantised weights on a CPU: "exact" (16 bits) or "fast" (8). `max_seq_len` None is the model's own context, 8,192
    tokens at most. `kv_type` to `reuse_prefixes` are `CacheSettings`; all answers and sessions share `pool_pages` pages
    of 64 tokens (None: 8 full contexts', or as many as the memory holds). `threads` counts for the whole process;
    `tensor_parallel` processes share the model out, each with so many. `capture=False` runs each op by itself: slower,
    with the same tokens. `chat_template` stands in place of the model's own; with `allow_special` control tokens that
    are written in a message are control, not text. `grammar_backend` holds answers to a schema, a pattern or a grammar.
    Safe to call from several threads.

    How an answer is sampled is given as `SamplingParams`, exactly, or as a mapping or keywords, over the model's own
    defaults: `generate("Once", temperature=0)`. `close()`, or `with LLM(...) as llm`, gives the memory back.
    """

    _host: Host | None

    @checks_settings
    def __init__(
        self,
        model: str | Path = "smollm2",
        *,
        device: DeviceName | str | torch.device = "cpu",
        dtype: DtypeName | torch.dtype = "auto",
        weights: WeightsType = "auto",
        precision: PrecisionName = "exact",
        max_seq_len: int | None = None,
        kv_type: KVType = "auto",
        eviction_policy: EvictionPolicy = "none",
        eviction_window: int = CacheSettings().eviction_window,
        protected_prefix: int = CacheSettings().protected_prefix,
        memory_threshold_mb: int | None = None,
        reuse_prefixes: bool = False,
        pool_pages: int | None = None,
        grammar_backend: GrammarBackend = "llguidance",
        threads: int | None = None,
        tensor_parallel: int = 1,
        capture: bool = True,
        chat_template: str | None = None,
        allow_special: bool = False,
        on_progress: OnProgress | None = None,
    ) -> None:
        self._host, self._shown = None, str(model)
        cache = CacheSettings(
            kv_type=kv_type, eviction_policy=eviction_policy, eviction_window=eviction_window,
            protected_prefix=protected_prefix, memory_threshold_mb=memory_threshold_mb, reuse_prefixes=reuse_prefixes,
        )  # fmt: skip
        kept_dtype = dtype_name(dtype)
        with threads_if_loaded(threads, tensor_parallel):
            checkpoint = open_checkpoint(model)
            tokenizer = load_tokenizer(checkpoint, chat_template=chat_template, allow_special=allow_special)
            stored = weights_name(checkpoint.metadata, checkpoint.tensors)
            checkpoint = checkpoint.without_metadata()
            if tokenizer.chat_template is not None:
                start_rendering()
            self.sampling_defaults = defaults_of(checkpoint)
            ranks = start_ranks(checkpoint, (kept_dtype, weights, precision), str(device), cache, tensor_parallel)
            loop, group = Loop(), None if ranks is None else ranks.group
            asked = checkpoint, tokenizer, device, dtype, weights, precision, max_seq_len
            # Rows of weights lie on the node of memory of the thread that packs them.
            network = loop.load(lambda show: load_checked(*asked, show, cache, group=group), on_progress)
        fingerprint = f"{checkpoint.fingerprint()} {weights} {precision} {kept_dtype}"
        kept = fingerprint, cache, pool_pages, capture, grammar_backend, self.sampling_defaults, checkpoint.pooling
        self._host = Host(loop, network, tokenizer, HostSettings(*kept), ranks)
        forms = kept_dtype, weights, stored
        self._shown = shown_as(model, checkpoint, network.architecture, forms, network.max_seq_len)
        self._host.warn_of_template(stacklevel=4)

    def __repr__(self) -> str:
        return f"LLM({self._shown}{', closed' if self._host is None else ''})"

    def __enter__(self) -> Self:
        self._opened.loop.check_open()
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise TypeError("an LLM cannot be copied or pickled: load it again, with LLM(...)")

    def close(self) -> None:
        """Give back the memory of the weights and the caches. For any thread; again does nothing.

        Answers under way end with finish_reason "abort", sessions are closed, and every later call raises ClosedError.
        """
        if self._host is not None:
            self._host.close()
            self._host = None
            gc.collect()
            give_back_freed()

    def trim(self) -> int:
        """Give the memory that no answer uses back to the system: how many bytes of the cache.

        Idle sessions lose what their cache holds, and compute it again with their next answer.
        """
        host = self._opened
        return host.loop.run(host.engine.trim)

    @property
    def _opened(self) -> Host:
        if (host := self._host) is None:
            raise closed()
        host.loop.check_open()
        return host

    @property
    def model(self) -> Transformer:
        """The network. Raises ClosedError after `close`, as all but `repr` does."""
        return self._opened.model

    @property
    def tokenizer(self) -> Tokenizer:
        return self._opened.tokenizer

    @property
    def architecture(self) -> Architecture:
        return self.model.architecture

    @property
    def max_seq_len(self) -> int:
        return self.model.max_seq_len

    @property
    def can_chat(self) -> bool:
        """Whether the model brings a chat template."""
        return self.tokenizer.chat_template is not None

    @property
    def system_fingerprint(self) -> str:
        """Of weights, tokenizer, template and settings: where it is the same, so are answers to the same request."""
        return self._opened.system_fingerprint

    def default_params(self, *, is_chat: bool = False) -> SamplingParams:
        """What a call without params is answered with: the model's own values, and neutral ones where it has none."""
        return default_params(self.sampling_defaults, is_chat=is_chat)

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
        """The whole answer to a text, ids or messages; to a list of texts a list of answers, as `generate_all` gives.

        Without `params` and keywords it is `default_params`, of a chat for messages. `on_token(token_id, text)` sees
        each token as it comes and cancels by returning False, `cancel` from another thread; both end with
        finish_reason "abort". For the rest see `stream`.
        """
        check_callback("on_token", on_token)
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
        """Pieces of text as they come; `.result` is there when they end.

        Keywords are fields of `SamplingParams` and of `RequestOptions`: `speculation="ngram"` verifies guesses of up to
        `num_draft_tokens` in one step: the same tokens, sooner where the text repeats. A prompt is run `prefill_chunk`
        tokens at a time, after each of which `on_prefill(done, total)` is called and `cancel` looked at. A prompt that
        is too long is an error, or with `overflow="truncate_left"` loses its beginning, so that the answer has its room
        (`prompt_ids.fitted`).
        """
        host = self._opened
        check_callback("on_prefill", on_prefill)
        options, sampling = split_options(options, keywords)
        return host.stream(host.sequence(prompt, params, options, sampling), on_prefill)

    def astream(self, prompt: Prompt, params: Params | None = None, **keywords: Any) -> AsyncStream:
        """`stream` for `async for`, with its keywords: `AsyncLLM.stream`."""
        host, (options, sampling) = self._opened, split_options(keywords.pop("options", None), keywords)
        return host.answers.stream(partial(host.sequence, prompt, params, options, sampling))

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
        """The answers to several prompts, in their order, up to `batch_size` of them in one step (64 at most).

        Each is what `generate` gives for its prompt and parameters, one set for all or one a prompt. Where one ends
        the next begins, and `on_result(index, result)` is called. All are checked before the first begins.
        """
        host = self._opened
        check_batch_size(batch_size)
        options, sampling = split_options(options, keywords)
        requests = list(host.requests(pairs_of(prompts, params), options, sampling))
        return results_of(host.loop, requests, batch_size, on_progress, on_result)

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
        """`(index, result)` of each answer as it ends, for as many prompts as there are. Prompts are taken and checked
        as they are needed: up to `batch_size` wait for those that are being answered. With `on_error(index, error)` one
        that is refused ends no others, and leaving the loop ends those under way.
        """
        check_callback("on_error", on_error)
        host = self._opened
        check_batch_size(batch_size)
        options, sampling = split_options(options, keywords)
        requests = host.requests(pairs_as_needed(prompts, params), options, sampling, on_error)
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
        """Answer a conversation, rendered by the model's own template. Keywords are those of `stream` and of
        `Tokenizer.encode_chat`, variables of the template among them.
        """
        check_callback("on_token", on_token)
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
        """`chat`, piece by piece."""
        host = self._opened
        check_callback("on_prefill", on_prefill)
        options, others = split_options(options, keywords)
        return host.stream(host.chat_sequence(messages, params, options, others), on_prefill)

    def session(
        self, *, system: str | None = None, tools: Sequence[ToolLike] | None = None, **template_variables: Any
    ) -> Session:
        """Many turns over one cache. A system message, tools and extra names go to the chat template of every turn; an
        answer may call the tools, whose results are messages with role "tool".
        """
        return begin_session(self._opened, system, tools, template_variables)

    def load_session(self, path: str | Path) -> Session:
        """A session that `Session.save` wrote, by this process or another one with the same model."""
        session = self.session()
        session.load(path)
        return session

    def prompt_logprobs(self, prompt: Prompt, *, num: int = 0) -> list[TokenLogprob | None]:
        """How likely the model holds each token of a prompt, beside the `num` likeliest; None for the first.

        Of the raw logits. Of these there are never more in memory than for 64 tokens.
        """
        host = self._opened
        return host.loop.call(score_prompt(host, ids_to_score(host, prompt, num), num)).get()

    def sample_trace(
        self,
        prompt: Prompt,
        params: Params | None = None,
        *,
        step: int = 1,
        num_candidates: int = 10,
        prompt_ids: Sequence[int] | None = None,
        options: RequestOptions | None = None,
        **keywords: Unpack[RequestKeywords],
    ) -> SampleTrace:
        """How the token of this step (1 follows the prompt) is sampled, stage by stage: the one `generate` gives.

        A prompt of messages is rendered as `chat` does; `prompt_ids` are its ids where they are spelled in another way,
        as a session's may be. Raises InvalidRequestError where the answer ends before.
        """
        host, (options, sampling) = self._opened, split_options(options, keywords)
        params = host.sampled_by(prompt, params, sampling)
        return trace_token(host, prompt, params, options, step, num_candidates, prompt_ids)

    def embed(
        self, texts: Sequence[Prompt], pooling: Pooling | None = None, *, normalize: bool = True
    ) -> Float[Tensor, "texts hidden"]:
        """A vector a text (or ids, or messages): of the hidden states after the last norm the mean, or the last:
        unless `pooling` says which, as the model was made for, else the mean.

        float32, of length 1 where `normalize`. Models that were trained for it give vectors that can be compared.
        """
        host = self._opened
        return host.loop.call(embed(host, texts_to_embed(host, texts, pooling), pooling, normalize=normalize)).get()

    def logits(self, token_ids: Sequence[int], *, last: int | None = None) -> Float[Tensor, "tokens vocab"]:
        """float32 logits after every token, or after the last few: `[tokens, vocab]` takes 4 bytes × vocab a token."""
        host = self._opened
        return host.loop.call(logits_of(host, ids_to_score(host, token_ids), last)).get()
