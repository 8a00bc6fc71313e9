"""The forward of a model for many rows in one batch, the sampling after it, and the cache that fits the memory.

What a step computes is provisional until `commit` keeps the first tokens of a chunk.
"""

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from infer.compute import ops
from infer.compute.kvcache.cache_settings import CacheSettings
from infer.compute.kvcache.paged import PagedCache
from infer.compute.kvcache.snapkv import PromptCompression
from infer.compute.operands.limits import StepLimits
from infer.compute.operands.mixers import Mixer
from infer.compute.operands.step import Chunk, Interrupt, Step, StepEnd
from infer.compute.sampling.columns import SamplingColumns
from infer.compute.sampling.history import History, remember
from infer.engine.runner.token_states import TokenStates
from infer.errors import InvalidRequestError
from infer.models.memory.memory_budget import MemoryBudget
from infer.models.memory.memory_estimate import LoadSettings
from infer.models.transformer import Transformer
from infer.sampling_params import SamplingParams


class Runner:
    """Rows of tokens over one cache, one for each slot of an engine. Each token is run once.

    A captured step is replayed from a dispatch table.

    `tensor_parallel.leading` has the runner of a model whose other ranks repeat each call.
    """

    has_whole_rows = True  # this process stores the whole of each row, so that a row can be saved
    cache_type: Callable[..., PagedCache] = PagedCache
    _history: History | None = None

    def __init__(
        self,
        model: Transformer,
        capacity: int,
        *,
        num_slots: int = 1,
        capture: bool = True,
        settings: CacheSettings | None = None,
        pool_pages: int | None = None,
        states: TokenStates | None = None,
        forward: Callable[[Step, PagedCache], Tensor] | None = None,
    ) -> None:
        """Make the cache for rows of up to `capacity` tokens. A step has at most as many tokens as the model's limits.

        The rows share `pool_pages` pages. If it is None, there are enough pages for all rows when full. `states`
        keeps those of committed tokens, if the device computes on the host. `forward` replaces the model's own.
        """
        self.model, self._backend, self.num_slots = model, model.backend, num_slots
        self.cache = cache = make_cache(
            model, capacity, num_slots, settings=settings, pool_pages=pool_pages, cache_type=self.cache_type
        )
        self.lengths: Sequence[int] = cache.lengths  # the number of committed tokens of each row
        # Prefixes can be shared if the values stored for a token do not depend on the length of its sequence.
        self.shares_prefixes = cache.shares_prefixes and model.rope_border is None
        self.checkpoint_tokens = cache.checkpoint_tokens if self.shares_prefixes else 0
        self._compression = PromptCompression(cache) if cache.settings.keeps_whole_prompts else None
        self.compresses_prompts = self._compression is not None  # once they are complete
        self._states = states
        self._forward = run = forward or (model.forward if states is None else states.forward)
        self._captured: ops.Recorded | None = None
        if capture:
            cache.reserve(0, 1)  # for the step that is recorded and not run
            self._captured = model.backend.capture(lambda step: run(step, cache), *model.step_limits)
            cache.truncate(0, 0)

    def warm_up(self, vocab_size: int) -> int:
        """Record steps before the first request, if the device compiles kernels for them, and return their number.

        Samplers are recorded for greedy answers, for filters, and for filters of logits that parameters change. A
        GPU's history is allocated, because the pool may have left no memory to the first request that needs it.
        """
        if self.model.device.type != "cpu":
            self._history = self.make_history(vocab_size)
        if not isinstance(self._captured, ops.Captured):
            return 0
        filtered = SamplingParams(temperature=1, top_k=20, top_p=0.9, seed=0)
        params = SamplingParams(temperature=0), filtered, replace(filtered, logit_bias={0: 1.0})
        return self._captured.record_ahead(
            [SamplingColumns.of([each], vocab_size, device=self.model.device) for each in params]
        )

    def record_next(self) -> bool:
        """Record steps of one more size, while none runs. Return False if no size is left that this process records."""
        captured = self._captured
        return self.has_whole_rows and isinstance(captured, ops.Captured) and captured.record_next()

    def make_history(self, vocab_size: int) -> History:
        """Return a history of all rows, in which each row has to begin. On a GPU it is the one of `warm_up`."""
        return self._history or History(self.num_slots, self.model.max_seq_len, vocab_size, self.model.device)

    # Changes of the rows, besides those of the cache

    def prompt_shortage(self, row: int) -> str:
        """Return which pages are missing for `after_prompt`, or an empty string if there are enough."""
        return "" if self._compression is None else self._compression.shortage(row)

    def commit(self, row: int, count: int) -> None:
        """Keep the first `count` of the tokens that were run."""
        if self._states is not None:
            self._states.keep(row, self.lengths[row], count)
        self.cache.commit(row, count)

    def choose_rope(self, row: int, length: int) -> bool:
        """Set the rope factors for sequences of this length. Return True if they changed, which empties the row."""
        if self.model.rope_border is None:
            return False
        is_long = self.model.is_long(length)
        if is_long == self.cache.is_long(row):
            return False
        self.cache.truncate(row, 0)
        self.cache.set_rope(row, is_long=is_long)
        return True

    @torch.inference_mode()
    def after_prompt(self, row: int, token_ids: Sequence[int]) -> None:
        """Compress the row's prompt, `token_ids`, if the cache does so. Call once a token after it was sampled."""
        if self._compression is not None:
            with self._backend.threads():
                self._compression.after_prompt(
                    row, token_ids, lambda step: self.model.forward(step.to(self.model.device), self.cache)
                )

    # Steps

    def forward(self, chunks: Sequence[Chunk]) -> Float[Tensor, "logits vocab"]:
        """Run the chunks provisionally, and return their logits, chunk after chunk."""
        if self._states is not None:
            self._states.expect(chunks)
        step = Step.of_chunks(chunks, self.starts(chunks))
        if self._captured is None:
            return self._forward(step.to(self.model.device), self.cache)
        return self._captured.run(step)

    def starts(self, chunks: Sequence[Chunk]) -> list[int]:
        """Return the position of the first token of each chunk."""
        lengths = self.lengths
        return [lengths[chunk.row] for chunk in chunks]

    @torch.inference_mode()
    def extend(self, row: int, token_ids: Sequence[int]) -> None:
        """Append tokens without computing logits. An exception leaves whole chunks of the tokens."""
        most = self.model.step_limits.tokens
        with self._backend.threads():
            for start in range(0, len(token_ids), most):
                chunk = token_ids[start : start + most]
                self.cache.reserve(row, len(chunk))
                self.forward([Chunk(row, chunk, has_logits=False)])
                self.commit(row, len(chunk))

    @torch.inference_mode()
    def append(self, row: int, token_ids: Sequence[int], num_logits: int) -> Float[Tensor, "logits vocab"]:
        """Append a few tokens, and return the logits after the last `num_logits`, at least one, as a new tensor."""
        with self._backend.threads():
            self.cache.reserve(row, len(token_ids))
            logits = self.forward([Chunk(row, token_ids, num_drafts=num_logits - 1)]).clone()
            self.commit(row, len(token_ids))
        return logits

    def launch(self, step: ops.SampledStep, behind: ops.PendingStep | None = None) -> ops.PendingStep:
        """Begin to run a step, and to sample after each chunk that has logits, while its drafts are right.

        If the device can run steps on its own, the step may still run when this returns. With `behind`, a step that is
        running and was launched last, a chunk may be one id of `operands.step.sampled_after`. `captured_for` must
        return a recording then.
        """
        if (captured := self.captured_for(step)) is not None:
            if self._states is not None:
                self._states.expect(step.chunks)
            return captured.launch(step, behind)
        with self._backend.threads(), ops.using(self._backend), torch.inference_mode():
            logits = self.forward(step.chunks)[:, : step.columns.vocab_size]
            self._backend.synchronize()
            return ops.PendingStep(verify(logits, step))

    def multi_step(
        self, step: ops.SampledStep, count: int, stop_ids: Collection[int] = (), interrupt: Interrupt | None = None
    ) -> ops.Generated:
        """Run up to `count` steps without a return to Python, from chunks of one token.

        Return the tokens that were sampled after each chunk, and the end of each step. The steps stop when every chunk
        has met a stop id, or when any thread sets `interrupt`. The last token may be the code of a failed row. All
        lists are empty if the steps are not captured.
        """
        if (captured := self.captured_for(step)) is None:
            return ops.Generated([], [], [])
        generated = captured.run_multi_step(step, count, tuple(stop_ids), interrupt)
        if self._states is not None:
            self._states.expect(step.chunks, len(generated.ends))
        return generated

    def captured_for(self, step: ops.SampledStep) -> ops.Captured | None:
        """Return the recording that runs the step and samples after its chunks, or None if there is none."""
        captured = self._captured
        return captured if isinstance(captured, ops.Captured) and captured.takes(step) else None

    def follow(self, chunks: Sequence[Chunk], count: int) -> None:
        """Run the steps of rank 0's `multi_step`. Rank 0 samples, and sends the tokens."""
        assert isinstance(self._captured, ops.Captured)
        self._captured.follow(chunks, self.starts(chunks), count)

    def profile(self, token_ids: Sequence[int]) -> list[tuple[str, int]]:
        """Return the label and the cycles of each command of a step. The sequence is unchanged."""
        if not isinstance(self._captured, ops.Captured):
            raise InvalidRequestError("a profile needs steps that are recorded: they are on a CPU, with capture on")
        length = self.cache.lengths[0]
        self.cache.reserve(0, len(token_ids))
        try:
            return self._captured.profile(Step.of(token_ids, length))
        finally:
            self.cache.truncate(0, length)  # so that a step of another length finds free pages


def verify(logits: Float[Tensor, "lines vocab"], step: ops.SampledStep) -> ops.Generated:
    """Sample line by line, now that the logits are known: `backends.cpu.capture.sampled` in plain torch.

    A chunk continues with its next line while the sampled token equals the draft. So its tokens are the accepted drafts
    and the token after them, or the code of a failed row. `masks` are on the host.
    """
    chunks, begins, columns, history, masks = step
    positions = [at + len(chunk.token_ids) - chunk.num_drafts for chunk, at in zip(chunks, begins, strict=True)]
    generated = ops.Generated([[] for _ in chunks], [], [[] for _ in chunks])
    starts = np.cumsum([0, *(chunk.num_logits for chunk in chunks)]).tolist()
    alive = [index for index, chunk in enumerate(chunks) if chunk.has_logits]
    entry, times = 0, [time.perf_counter()]
    if masks is not None:
        masks.wait()
    while alive:
        # Every row takes part. A row that is done takes any line, and its token is ignored.
        lines = torch.full((len(chunks),), starts[alive[0]] + entry)
        for index in alive:
            lines[index] = starts[index] + entry
        where = torch.tensor(positions, device=logits.device) + entry
        allowed = None if masks is None else masks.words[lines].to(logits.device)
        sampled = ops.sample(logits[lines.to(logits.device)], columns, history, where, allowed)
        token_ids = sampled.token_ids.tolist()
        for index in alive:
            generated.token_ids[index].append(token_ids[index])
            if (num_logprobs := columns.num_logprobs[index]) is not None and token_ids[index] >= 0:
                generated.logprobs[index].append(sampled.logprob_of(index, num_logprobs))
        remember(history, columns, [index for index in alive if token_ids[index] >= 0], sampled.token_ids)
        alive = [i for i in alive if entry < chunks[i].num_drafts and token_ids[i] == chunks[i].drafts[entry]]
        ops.backend_of(logits.device).synchronize()
        times.append(time.perf_counter())
        entry += 1
    generated.ends.extend(StepEnd(*pair) for pair in pairwise(times))
    return generated


def make_cache(
    model: Transformer,
    capacity: int,
    num_rows: int = 1,
    *,
    settings: CacheSettings | None = None,
    step_tokens: int | None = None,
    pool_pages: int | None = None,
    cache_type: Callable[..., PagedCache] = PagedCache,
) -> PagedCache:
    """Return a cache whose rows get up to `step_tokens` tokens in one step. None means the model's limit.

    It has `pool_pages` pages, or enough pages for all rows when full. Raises InvalidRequestError, with nothing
    allocated, if the available memory would not hold all pages.
    """
    settings, step_tokens = settings or CacheSettings(), step_tokens or model.step_limits.tokens
    limits = StepLimits(step_tokens, num_rows)
    budget = _budget_of(model, model.own_mixers, settings, limits, num_tokens=capacity, pool_pages=pool_pages)
    budget.check_rows(model.backend.available_bytes())
    with ops.using(model.backend):
        return cache_type(
            budget.layers,
            num_rows,
            capacity,
            budget.kv_type,
            model.device,
            step_tokens=step_tokens,
            settings=settings,
            context=model.architecture.most_positions,
            pool_pages=pool_pages,
        )


def plan_rows(model: Transformer, settings: CacheSettings, pool_pages: int | None, reserved: int = 0) -> MemoryBudget:
    """Return the budget of a step's rows in the available memory but `reserved` bytes, with `pool_pages` if given."""
    # The ranks of a model share a host's memory, but each GPU belongs to one of them.
    layers = model.architecture.cached_mixers if model.backend.computes_on_host else model.own_mixers
    budget = _budget_of(model, layers, settings, model.step_limits, num_tokens=model.max_seq_len, pool_pages=pool_pages)
    return budget.planned(model.backend.available_bytes(), reserved)


def _budget_of(
    model: Transformer,
    layers: Sequence[Mixer],
    settings: CacheSettings,
    limits: StepLimits,
    *,
    num_tokens: int,
    pool_pages: int | None,
) -> MemoryBudget:
    """Return the budget of `limits.logits` rows of a loaded model."""
    kv_type = model.kv_type if settings.kv_type == "auto" else settings.kv_type
    load = LoadSettings(device=model.device.type, limits=limits)
    return MemoryBudget(model.architecture, layers, kv_type, load, settings, num_tokens, limits.logits, pool_pages)
