"""`LLM`: a model, its tokenizer and its cache behind the few calls that most programs need."""

import threading
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, final

import torch
from jaxtyping import Float
from torch import Tensor

from infer.admission import begin, check_prompt, vocab_size_of
from infer.architecture import Architecture
from infer.batch import Step
from infer.cache.settings import CacheSettings
from infer.checkpoint import open_checkpoint
from infer.checkpoint.defaults import sampling_defaults
from infer.constraint import grammar_of, make_compiler
from infer.context import PREFILL_CHUNK, CachedContext, make_cache
from infer.decode import Batch, OnPrefill, OnToken, Stream, run_all
from infer.draft import MAX_DRAFT_TOKENS, NUM_DRAFT_TOKENS
from infer.errors import InferError, InvalidRequestError
from infer.loading import load_checked, load_model, load_tokenizer, set_num_threads
from infer.model.load import OnProgress
from infer.params import SamplingParams
from infer.results import GenerationResult, SampleTrace, TokenLogprob
from infer.running import Running
from infer.said import Said
from infer.sampling import trace
from infer.session import Host, Session
from infer.tokenizer.rendering import start_rendering

__all__ = ["LLM", "load_model", "load_tokenizer", "set_num_threads"]

BATCH_SIZE = 8  # prompts in one step
MAX_LOGPROBS = 20

Message = Mapping[str, Any]
Prompt = str | Sequence[int] | Sequence[Message]  # a text, ids, or messages for the model's chat template


@final
class LLM:
    """A loaded model. `model` is a folder, a `.gguf` file, the name of an installed package (`smollm2`) or one on the
    hub (`org/repo`, `org/repo:Q4_K_M`: `checkpoint.hub`).

    `dtype="auto"` keeps the weights as their file stores them; a float type dequantises them at load.
    `weights="q8"` or `"q4"` quantises float weights at load, `"bf16"` rounds them. `precision` is that of the
    activations beside quantised weights on a CPU: "exact" (16 bits) or "fast" (8). `max_seq_len` None is the model's
    own context, 8,192 tokens at most. `kv_type` to `reuse_prefixes` are `CacheSettings`. `threads` counts for the
    whole process. `capture=False` runs each op by itself: slower, with the same tokens. `chat_template` stands in place
    of the model's own; with `allow_special` control tokens that are written in a message are control, not text. Safe to
    call from several threads.
    """

    def __init__(
        self,
        model: str | Path = "smollm2",
        *,
        device: str | torch.device = "cpu",
        dtype: str | torch.dtype = "auto",
        weights: str = "auto",
        precision: str = "exact",
        max_seq_len: int | None = None,
        kv_type: str = "auto",
        eviction_policy: str = "none",
        eviction_window: int = CacheSettings().eviction_window,
        protected_prefix: int = CacheSettings().protected_prefix,
        memory_threshold_mb: int | None = None,
        reuse_prefixes: bool = False,
        threads: int | None = None,
        capture: bool = True,
        chat_template: str | None = None,
        allow_special: bool = False,
        on_progress: OnProgress | None = None,
    ) -> None:
        self._cache_settings = CacheSettings(
            kv_type=kv_type,
            eviction_policy=eviction_policy,
            eviction_window=eviction_window,
            protected_prefix=protected_prefix,
            memory_threshold_mb=memory_threshold_mb,
            reuse_prefixes=reuse_prefixes,
        )
        checkpoint = open_checkpoint(model)
        if threads is not None:
            set_num_threads(threads)
        self.tokenizer = load_tokenizer(checkpoint, chat_template=chat_template, allow_special=allow_special)
        checkpoint = checkpoint.without_metadata()
        if self.can_chat:
            start_rendering()
        self.sampling_defaults = sampling_defaults(checkpoint.generation_config)
        settings = (device, dtype, weights, precision, max_seq_len)
        self.model = load_checked(checkpoint, self.tokenizer, *settings, on_progress, self._cache_settings)
        self._weights = f"{checkpoint.fingerprint()} {weights} {precision} {dtype}"
        checkpoint.release_pages()
        self._capture = capture
        self._compiler = make_compiler(self.tokenizer, vocab_size_of(self.model, self.tokenizer))
        self._idle: list[CachedContext] = []
        if self.can_chat:
            self._warn_of_a_broken_template()

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

    def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        on_token: OnToken | None = None,
        cancel: threading.Event | None = None,
        speculation: str | None = None,
        num_draft_tokens: int = NUM_DRAFT_TOKENS,
        prefill_chunk: int = PREFILL_CHUNK,
        on_prefill: OnPrefill | None = None,
    ) -> GenerationResult:
        """The whole answer. `params` None takes the model's own sampling defaults.

        `on_token(token_id, text)` sees each token as it comes and cancels by returning False, `cancel` from another
        thread; both end with finish_reason "abort". For the rest see `stream`.
        """
        stream = self.stream(
            prompt,
            params,
            cancel=cancel,
            speculation=speculation,
            num_draft_tokens=num_draft_tokens,
            prefill_chunk=prefill_chunk,
            on_prefill=on_prefill,
        )
        return stream.run(on_token)

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        cancel: threading.Event | None = None,
        speculation: str | None = None,
        num_draft_tokens: int = NUM_DRAFT_TOKENS,
        prefill_chunk: int = PREFILL_CHUNK,
        on_prefill: OnPrefill | None = None,
    ) -> Stream:
        """Pieces of text as they come; `.result` is there when they end.

        `speculation="ngram"` verifies guesses of up to `num_draft_tokens` in one step: the same tokens, sooner where
        the text repeats. A prompt is run `prefill_chunk` tokens at a time, after each of which
        `on_prefill(done, total)` is called and `cancel` looked at.
        """
        _check_chunk(prefill_chunk)
        running = self._begin(prompt, params, speculation, num_draft_tokens, cancel)
        context = self._take_context()
        running.reuse(context.adopt(0, running.generation.prompt_token_ids))
        batch = Batch(context, self.model.device, prefill_chunk=prefill_chunk)
        return Stream(running, batch, on_prefill=on_prefill, on_end=lambda: self._give_back(context))

    def generate_all(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        batch_size: int = BATCH_SIZE,
        speculation: str | None = None,
        num_draft_tokens: int = NUM_DRAFT_TOKENS,
        prefill_chunk: int = PREFILL_CHUNK,
        cancel: threading.Event | None = None,
        on_progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> list[GenerationResult]:
        """The answers to several prompts, in their order, up to `batch_size` of them in one step.

        Each is what `generate` gives for its prompt and parameters, one set for all or one a prompt. An answer that
        ends makes room for the next prompt. All are checked before the first begins.
        """
        _check_chunk(prefill_chunk)
        if batch_size < 1:
            raise InvalidRequestError(f"batch_size must be at least 1, got {batch_size}")
        each = [params] * len(prompts) if params is None or isinstance(params, SamplingParams) else list(params)
        if len(each) != len(prompts):
            raise InvalidRequestError(f"params must be one or one a prompt: {len(prompts)} prompts, {len(each)} params")
        waiting = []
        for index, (prompt, own) in enumerate(zip(prompts, each, strict=True)):
            try:
                waiting.append(self._begin(prompt, own, speculation, num_draft_tokens, cancel))
            except InvalidRequestError as error:
                raise type(error)(f"prompt {index}: {error}") from error
        return run_all(
            self.model,
            waiting,
            batch_size,
            on_progress,
            prefill_chunk=prefill_chunk,
            capture=self._capture,
            settings=self._cache_settings,
        )

    def _begin(
        self,
        prompt: Prompt,
        params: SamplingParams | None,
        speculation: str | None,
        num_draft_tokens: int,
        cancel: threading.Event | None,
    ) -> Running:
        if speculation not in (None, "ngram"):
            raise InvalidRequestError(f"speculation must be 'ngram' or None, got {speculation!r}")
        if not 1 <= num_draft_tokens <= MAX_DRAFT_TOKENS:
            raise InvalidRequestError(f"num_draft_tokens must be in [1, {MAX_DRAFT_TOKENS}], got {num_draft_tokens}")
        params = SamplingParams(**self.sampling_defaults) if params is None else params
        generation = begin(self.model, self.tokenizer, self._encode(prompt), params)
        grammar = grammar_of(params)
        return Running(
            generation,
            constraint=None if grammar is None else self._compiler.compile(grammar),
            num_draft_tokens=num_draft_tokens if speculation else 0,
            cancel=cancel,
        )

    def chat(
        self,
        messages: Sequence[Message],
        params: SamplingParams | None = None,
        *,
        on_token: OnToken | None = None,
        cancel: threading.Event | None = None,
        **template_variables: Any,
    ) -> GenerationResult:
        """Answer a conversation, rendered by the model's own template; for extra names see `Tokenizer.encode_chat`."""
        token_ids = self.tokenizer.encode_chat(messages, **template_variables)
        return self.generate(token_ids, params, on_token=on_token, cancel=cancel)

    def session(
        self, *, system: str | None = None, tools: Sequence[Message] | None = None, **template_variables: Any
    ) -> Session:
        """Many turns over one cache. A system message, tools and extra names go to the chat template of every turn."""
        messages = [] if system is None else [{"role": "system", "content": system}]
        template = template_variables | ({} if tools is None else {"tools": list(tools)})
        if (messages or template) and not self.can_chat:
            raise InvalidRequestError("the model has no chat template: use append() and generate() with plain text")
        host = Host(self.model, self.tokenizer, self._weights, self._begin, self._take_context, self._give_back)
        return Session(host, Said(messages=messages, template=template, num_given=len(messages)))

    def load_session(self, path: str | Path) -> Session:
        """A session that `Session.save` wrote, by this process or another one with the same model."""
        session = self.session()
        session.load(path)
        return session

    def prompt_logprobs(self, prompt: Prompt | Sequence[Message], *, num: int = 0) -> list[TokenLogprob | None]:
        """How likely the model holds each token of a prompt, beside the `num` likeliest; None for the first.

        Of the raw logits. Of these there are never more in memory than for 64 tokens.
        """
        if not 0 <= num <= MAX_LOGPROBS:
            raise InvalidRequestError(f"num must be in [0, {MAX_LOGPROBS}], got {num}")
        token_ids = check_prompt(self.model, self.tokenizer, self._encode(prompt), room=0)
        context = self._take_context()
        try:
            return [None, *context.score(0, token_ids, num, vocab_size_of(self.model, self.tokenizer))]
        finally:
            self._give_back(context)

    def sample_trace(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        step: int = 1,
        num_candidates: int = 10,
    ) -> SampleTrace:
        """How the token of this step (1 follows the prompt) is sampled, stage by stage: the one `generate` gives.

        A prompt of messages is rendered as `chat` does. Raises InvalidRequestError where the answer ends before.
        """
        if self._cache_settings.keeps_whole_prompts:
            raise InvalidRequestError(
                "a trace has logits of the whole text, of which snapkv keeps a part: load without it"
            )
        if step < 1:
            raise InvalidRequestError(f"step must be at least 1, the first token after the prompt, got {step}")
        params = SamplingParams(**self.sampling_defaults) if params is None else params
        params = replace(params, max_new_tokens=step, min_new_tokens=min(params.min_new_tokens, step))
        token_ids = check_prompt(self.model, self.tokenizer, self._encode(prompt), room=1)
        result = self.generate(token_ids, params)
        if result.error is not None:
            raise InvalidRequestError(f"the generation ended early: {result.error}")
        if len(result.token_ids) < step:
            why = f"{result.finish_reason}, {result.stop_reason!r}"
            raise InvalidRequestError(
                f"step must be at most {len(result.token_ids)}, where the answer ends ({why}), got {step}"
            )
        context = token_ids + result.token_ids[: step - 1]
        found = trace.sample_trace(
            self.logits(context, last=1)[0, : vocab_size_of(self.model, self.tokenizer)],
            replace(params, seed=result.seed),
            context,
            num_prompt_tokens=len(token_ids),
            eos_token_ids=self.tokenizer.eos_token_ids,
            num_candidates=num_candidates,
        )
        if found.token_id != result.token_ids[-1]:
            raise InferError(f"the trace ends in token {found.token_id}, the answer in {result.token_ids[-1]}")
        texts = self.tokenizer.token_bytes
        return replace(
            found,
            text_before=self.tokenizer.decode(context, skip_special_tokens=False),
            candidates=tuple(
                replace(candidate, text=texts[candidate.token_id].decode("utf-8", errors="backslashreplace"))
                for candidate in found.candidates
            ),
        )

    def _warn_of_a_broken_template(self) -> None:
        """Said at load, not at the first conversation; plain text needs no template."""
        try:
            self.tokenizer.check_chat_template()
        except InvalidRequestError as error:
            warnings.warn(f"no conversation will work: {error}", stacklevel=3)

    def _encode(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            return self.tokenizer.encode(prompt)
        if not isinstance(prompt, Iterable):
            raise InvalidRequestError(f"a prompt must be a text, ids or messages, got {type(prompt).__name__}")
        given: list[Any] = list(prompt)
        return self.tokenizer.encode_chat(given) if any(isinstance(each, Mapping) for each in given) else given

    @torch.inference_mode()
    def logits(self, token_ids: Sequence[int], *, last: int | None = None) -> Float[Tensor, "tokens vocab"]:
        """float32 logits after every token, or after the last few: `[tokens, vocab]` takes 4 bytes × vocab a token."""
        token_ids = check_prompt(self.model, self.tokenizer, token_ids, room=0)
        model = self.model.for_length(len(token_ids))
        cache = make_cache(model, len(token_ids), settings=self._cache_settings)
        first = 0 if last is None else max(len(token_ids) - last, 0)
        chunks = []
        for start in range(0, len(token_ids), PREFILL_CHUNK):
            chunk = token_ids[start : start + PREFILL_CHUNK]
            step = Step.of(chunk, start, wanted=range(max(first - start, 0), len(chunk))).to(self.model.device)
            cache.reserve(0, len(chunk))
            chunks.append(model.forward(step, cache))
            cache.commit([len(chunk)])
        return torch.cat(chunks)

    def _take_context(self) -> CachedContext:
        """An empty sequence, one that was given back if there is one: its cache is there and its step recorded."""
        try:
            return self._idle.pop()
        except IndexError:
            return CachedContext(self.model, self.max_seq_len, capture=self._capture, settings=self._cache_settings)

    def _give_back(self, context: CachedContext) -> None:
        context.clear()
        self._idle.append(context)


def _check_chunk(prefill_chunk: int) -> None:
    if not 1 <= prefill_chunk <= PREFILL_CHUNK:
        raise InvalidRequestError(f"prefill_chunk must be in [1, {PREFILL_CHUNK}], got {prefill_chunk}")
