"""The oracle of every cache: a runner that computes the whole sequence again for each step."""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from infer import LLM, GenerationResult, SamplingParams
from infer.compute.kvcache.cache_settings import CacheSettings
from infer.compute.kvcache.paged import PagedCache
from infer.compute.operands.step import Chunk, Step
from infer.engine.engine import Engine
from infer.engine.runner.runner import Runner, make_cache
from infer.engine.step.request import Request, check_prompt, checked_params, limits_of
from infer.engine.step.request_options import split_options
from infer.engine.step.sequence import Sequence as Answering
from infer.models.transformer import Transformer
from infer.text.tokenizer import Tokenizer


class IdsOnly(PagedCache):
    """The ids of one row, without keys and values."""

    settings, pool_pages, groups = CacheSettings(), [], []

    def __init__(self) -> None:
        self.token_ids, self.provisional, self.lengths, self._keys = list[int](), list[int](), [0], [[]]

    def reset(self) -> None:
        self.truncate(0, 0)

    def try_reserve(self, row: int, num_tokens: int) -> str:
        return ""

    def commit(self, row: int, count: int) -> None:
        self.token_ids += self.provisional[:count]
        self.lengths[0] = len(self.token_ids)

    def truncate(self, row: int, length: int) -> None:
        del self.token_ids[length:]
        self.lengths[0] = len(self.token_ids)


class CachelessRunner(Runner):
    """A runner of one slot without a cache, for a fake model. `forward` returns the logits of one chunk."""

    num_slots, checkpoint_tokens, shares_prefixes, compresses_prompts = 1, 0, False, False

    def __init__(self, model: Transformer) -> None:
        self.model, self._backend, self._captured, self._states = model, model.backend, None, None
        self.cache = self._ids = IdsOnly()
        self.lengths = self.cache.lengths

    def forward(self, chunks: Sequence[Chunk]) -> Float[Tensor, "logits vocab"]:
        (chunk,) = chunks
        self._ids.provisional = list(chunk.token_ids)
        return self.logits_of(chunk)

    def logits_of(self, chunk: Chunk) -> Float[Tensor, "logits vocab"]:
        raise NotImplementedError

    def choose_rope(self, slot: int, length: int) -> bool:
        return False


class RecomputeRunner(CachelessRunner):
    """A slow runner that does not depend on a cache, so its answers are right."""

    def __init__(self, model: Transformer, settings: CacheSettings | None = None) -> None:
        super().__init__(model)
        self._settings = settings

    def logits_of(self, chunk: Chunk) -> Float[Tensor, "logits vocab"]:
        token_ids = [*self._ids.token_ids, *chunk.token_ids]
        cache = make_cache(self.model, len(token_ids), step_tokens=len(token_ids), settings=self._settings)
        cache.set_rope(0, is_long=self.model.is_long(len(token_ids)))
        cache.reserve(0, len(token_ids))
        step = Step.of(token_ids, logit_indices=range(len(token_ids) - chunk.num_logits, len(token_ids)))
        return self.model.forward(step.to(self.model.device), cache)


def make_request(
    model: Transformer, tokenizer: Tokenizer, prompt_token_ids: Sequence[int], params: SamplingParams, **values: Any
) -> Request:
    """Return a checked request. `values` are its options or further fields."""
    limits = limits_of(model, tokenizer)
    token_ids = tuple(check_prompt(limits, prompt_token_ids, room=1))
    seeded = checked_params(limits, params)
    options, fields = split_options(None, values)
    return Request(tokenizer, token_ids, seeded, limits.max_seq_len, limits.vocab_size, options, **fields)


def generate_recomputed(llm: LLM, prompt_token_ids: Sequence[int], params: SamplingParams) -> GenerationResult:
    """Return the result of `LLM.generate`, computed without a cache."""
    engine = Engine(RecomputeRunner(llm.model))
    answer = engine.submit(Answering(make_request(llm.model, llm.tokenizer, prompt_token_ids, params)))
    with llm.model.backend.threads(), torch.inference_mode():
        while not answer.has_ended:
            engine.step()
    return answer.result()
