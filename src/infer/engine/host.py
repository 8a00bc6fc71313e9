"""A loaded model and how it begins an answer: what `LLM` and its sessions share."""

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, final

from infer.engine.admission import begin, vocab_size_of
from infer.engine.decode import Batch, OnPrefill
from infer.engine.prompt_ids import Prompt, PromptIds, fitted, is_conversation, prompt_ids
from infer.engine.request_options import RequestOptions
from infer.engine.running import Running
from infer.engine.stream import Stream
from infer.errors import InvalidRequestError
from infer.grammar import grammar_of, make_compiler
from infer.kvcache.settings import CacheSettings
from infer.model.transformer import Transformer
from infer.runner.closing import OpenAnswers
from infer.runner.context import CachedContext
from infer.runner.context_pool import ContextPool
from infer.sampling.keywords import Params, params_of
from infer.sampling_params import SamplingParams
from infer.tokenizer import Tokenizer

Encode = Callable[[Prompt], list[int]]


@final
@dataclass(frozen=True)
class HostSettings:
    """`weights` tells them from others; `sampling_defaults` are the model's own."""

    weights: str
    cache: CacheSettings
    capture: bool
    grammar_backend: str
    sampling_defaults: Mapping[str, Any]


@final
class Host:
    def __init__(self, model: Transformer, tokenizer: Tokenizer, settings: HostSettings) -> None:
        self.model, self.tokenizer, self.settings = model, tokenizer, settings
        self.vocab_size = vocab_size_of(model, tokenizer)
        self.contexts = ContextPool(
            partial(CachedContext, model, model.max_seq_len, capture=settings.capture, settings=settings.cache)
        )
        self.open = OpenAnswers()
        self._compiler = make_compiler(tokenizer, self.vocab_size, backend=settings.grammar_backend)

    def close(self) -> None:
        self.open.close()
        self.contexts.close()

    def template_problem(self) -> InvalidRequestError | None:
        """What is wrong with the model's own chat template; plain text needs none."""
        if self.tokenizer.chat_template is None:
            return None
        try:
            self.tokenizer.check_chat_template()
        except InvalidRequestError as error:
            return error
        return None

    def fingerprint(self, cache_kind: str) -> dict[str, str]:
        """What must be the same for a saved cache to mean the same."""
        tokenizer = self.tokenizer
        vocabulary = repr((tokenizer.token_bytes, sorted(tokenizer.special_token_ids), sorted(tokenizer.eos_token_ids)))
        return {
            "architecture": _digest(repr(self.model.architecture)),
            "tokenizer": _digest(vocabulary),
            "weights": self.settings.weights,
            "cache": cache_kind,
        }

    def encode(self, prompt: Prompt) -> list[int]:
        return prompt_ids(prompt, self.tokenizer, self.model.max_seq_len)

    def sampled_by(self, prompt: Prompt, params: Params | None, keywords: Mapping[str, Any]) -> SamplingParams:
        """A conversation has other neutral values than a text."""
        return params_of(params, keywords, self.settings.sampling_defaults, is_chat=is_conversation(prompt))

    def fit(self, prompt: Prompt, params: SamplingParams, options: RequestOptions, encode: Encode | None) -> PromptIds:
        """`encode` None is `self.encode`."""
        bos, most = self.tokenizer.bos_token_id, self.model.max_seq_len
        if encode is None:
            longest = most if options.overflow == "error" else None
            encode = partial(prompt_ids, tokenizer=self.tokenizer, max_seq_len=longest)
        return fitted(prompt, encode, bos, most, params, options.overflow)

    def begin(self, prompt: PromptIds, params: SamplingParams, options: RequestOptions) -> Running:
        """A request that was checked, whose grammar is compiled. Raises InvalidRequestError."""
        generation = begin(self.model, self.tokenizer, prompt.token_ids, params)
        generation.truncated_tokens = prompt.truncated_tokens
        grammar = grammar_of(params)
        return Running(
            generation,
            constraint=None if grammar is None else self._compiler.compile(grammar),
            num_draft_tokens=options.num_draft_tokens if options.speculation else 0,
            cancel=options.cancel,
        )

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams,
        options: RequestOptions,
        *,
        on_prefill: OnPrefill | None = None,
        encode: Encode | None = None,
    ) -> Stream:
        """An answer in a context of its own."""
        running = self.begin(self.fit(prompt, params, options, encode), params, options)
        context = self.contexts.take()
        running.reuse(context.adopt(0, running.generation.prompt_token_ids))
        batch = Batch(context, self.model.device, prefill_chunk=options.prefill_chunk)
        stream = Stream(running, batch, on_prefill=on_prefill, on_end=partial(self.contexts.give_back_once, [context]))
        self.open.add(stream, Stream.close)
        return stream


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
