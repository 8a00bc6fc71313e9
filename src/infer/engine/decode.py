"""The one loop: what each row lacks, a forward, samples, what of them stays; then the same again.

A step serves rows that are at different places: chunks of prompts, single tokens, drafts to verify, masked or free.
Where every row lacks one token and nothing is asked of the next ones, up to `chain` steps run without a return to
Python, and what they gave beyond a stop is dropped. The loop knows neither text nor caches: a `Running` is what one
generation has said, a `Context` where its logits come from.
"""

import time
from collections.abc import Callable, Generator, Iterator, Sequence
from functools import partial
from typing import final

import torch

from infer.engine.generation import Generation
from infer.engine.grammar_masks import MaskFiller
from infer.engine.running import Running
from infer.kvcache.settings import CacheSettings
from infer.model.transformer import Transformer
from infer.operands.step import Clock, Masks, Part, StepEnd
from infer.outputs import GenerationResult, Piece
from infer.runner.context import MAX_LINES, PREFILL_CHUNK, CachedContext, Context
from infer.runner.verify import SampledTokens
from infer.sampling.columns import SamplingColumns, uses_history
from infer.sampling.history import History
from infer.speculation.policy import StepTimes

CHAIN = 8  # tokens per return to Python, while it is not known how long they take
LONGEST_CHAIN, CHAIN_SECONDS, SMOOTHING = 64, 0.1, 0.3

OnToken = Callable[[int, str], bool | None]
OnPrefill = Callable[[int, int], None]
OnResult = Callable[[int, GenerationResult], None]


@final
class Batch:
    """The generations that share a context. Rows that finish leave; new ones may take their places at any time."""

    def __init__(
        self, context: Context, device: torch.device, *, prefill_chunk: int = PREFILL_CHUNK, chain: int | None = None
    ) -> None:
        """`chain` None: as many tokens as fit a tenth of a second, in which tokens come and a cancel is seen."""
        self._context, self._device = context, device
        self._prefill_chunk, self._chain = prefill_chunk, chain
        self.active: list[Running] = []
        self._columns: SamplingColumns | None = None  # of the context's rows
        self._history: History | None = None
        self._seconds_per_token = 0.0  # of steps of one token a row; 0: not known
        self._filler = MaskFiller(device)

    def add(self, running: Running) -> None:
        """Its row of the context holds `reused_tokens` tokens of its prompt."""
        generation, row = running.generation, running.row
        running.begin()
        running.must_end_prompt = self._context.compresses_prompts
        if self._columns is None:
            num_rows, end_ids = len(self._context.lengths), generation.tokenizer.eos_token_ids
            self._columns = SamplingColumns(num_rows, generation.vocab_size, end_ids=end_ids, device=self._device)
        self._columns.write(row, generation.params, len(generation.prompt_token_ids))
        self.active.append(running)
        if uses_history(running.params):
            self._history = self._with_room(self._history, row + 1, generation)
            self._history.begin(row, generation.history, len(generation.prompt_token_ids))

    def step(self) -> Iterator[tuple[Running, Piece]]:
        """Run one step or chain and yield each token as it is accepted; `active` shrinks by those that finished.

        What is raised within, but by closing between two tokens, leaves a context that is not sound.
        """
        self._context.is_sound = False
        try:
            yield from self._run_step()
        except GeneratorExit:  # each row has been settled
            self._context.is_sound = True
            raise
        self._context.is_sound = True

    def _run_step(self) -> Iterator[tuple[Running, Piece]]:
        for running in self.active:
            if not running.is_finished():
                forced, forcing = list[int](), running.force()
                try:
                    while (token_id := running.attempt(partial(next, forcing, None), None)) is not None:
                        forced.append(token_id)
                        yield from self._accept(running, [token_id])
                finally:
                    self._remember(running, forced)
        self._leave()
        if not self.active:
            return
        started = self._now()
        parts = self._plan()
        if any(running.has_fault for running in self.active):
            parts = [part for part, running in zip(parts, self.active, strict=True) if not running.has_fault]
            self._leave()
            if not self.active:
                return
        masks = self._filler.start(self.active, parts)
        chains, ends = self._try_chain(parts, masks)
        sampled = list[SampledTokens]()
        if not chains:
            sampled, ends = self._context.sample(parts, self._selected(), self._history, masks)
        if masks is not None:
            masks.wait()
        clock = Clock(started, ends, self._now())
        seconds = clock.ended - started
        self._learn(parts, len(chains[0]) if chains else 1, seconds)
        for index, running in enumerate(self.active):
            if chains:
                yield from self._settle_chain(running, chains[index], clock)
            elif not parts[index].is_wanted:
                self._context.commit(running.row, len(parts[index].token_ids))
                running.prefilled(len(parts[index].token_ids), seconds)
            else:
                yield from self._settle(running, parts[index], sampled[index], clock)
        self._leave()

    def close(self) -> None:
        self._filler.close()

    def _now(self) -> float:
        """What was asked of the device before has been read."""
        return time.perf_counter()

    def _leave(self) -> None:
        staying = [running for running in self.active if not running.is_finished()]
        if len(staying) < len(self.active):
            for running in self.active:
                if running.is_finished():
                    if running.has_fault:
                        self._context.forget(running.row)
                    running.leave()
            self.active = staying

    def _selected(self) -> SamplingColumns:
        assert self._columns is not None
        self._columns.select([running.row for running in self.active])
        return self._columns

    def _with_room(self, history: History | None, num_slots: int, generation: Generation) -> History:
        num_slots = max(num_slots, len(self._context.lengths))
        if history is not None and history.capacity >= generation.max_tokens:
            return history
        larger = History(num_slots, generation.max_tokens, generation.vocab_size, self._device)
        for running in self.active[:-1]:
            if uses_history(running.params):
                seen = running.generation
                larger.begin(running.row, seen.history, len(seen.prompt_token_ids))
        return larger

    def _remember(self, running: Running, token_ids: Sequence[int]) -> None:
        """Tokens that were not sampled."""
        if token_ids and self._history is not None and uses_history(running.params):
            self._history.extend(running.row, token_ids)

    def _plan(self) -> list[Part]:
        """A part for each active row: `prefill_chunk` tokens in all, unless more rows than that decode.

        Those that decode come first, a token each; what is left of the chunk goes to their drafts, then to prompts.
        """
        max_drafts = MAX_LINES // len(self.active) - 1
        times = self._step_times()
        part_by_row = {}
        num_decoding = sum(running.is_decoding for running in self.active)
        num_reading = min(1, len(self.active) - num_decoding)  # a token is left to a prompt
        budget = max(self._prefill_chunk - num_decoding - num_reading, 0)
        for running in self.active:
            running.step_times = times
            if running.is_decoding:
                most = min(max_drafts, self._context.max_drafts(running.row))
                part_by_row[running.row] = part = self._part(running, 1 + budget, most)
                budget -= part.num_drafts
        budget += num_reading
        for running in self.active:
            if running.row not in part_by_row:
                room = self._context.max_drafts(running.row) - len(running.pending) + 1
                part_by_row[running.row] = part = self._part(running, budget, min(max_drafts, room))
                budget -= len(part.token_ids)
        return [part_by_row[running.row] for running in self.active]

    def _part(self, running: Running, budget: int, max_drafts: int) -> Part:
        """No token of a row whose grammar or drafts raise."""
        nothing = Part(running.row, [], is_wanted=False)
        return running.attempt(partial(running.plan, budget, max_drafts), nothing)

    def _try_chain(self, parts: Sequence[Part], masks: Masks | None) -> tuple[list[list[int]], list[StepEnd]]:
        if any(part.num_drafts for part in parts) or not all(running.can_chain for running in self.active):
            return [], []
        count = min(running.generation.room for running in self.active)
        count = min([count, self._longest_chain(), *(running.chain_limit for running in self.active)])
        if count < 2:
            return [], []
        tokens = [(part.row, part.token_ids[0]) for part in parts]
        stop_ids = frozenset().union(*(running.generation.stop_ids for running in self.active))
        return self._context.chain(tokens, count, self._selected(), self._history, stop_ids, masks)

    def _longest_chain(self) -> int:
        if self._chain is not None:
            return self._chain
        if self._seconds_per_token == 0:
            return CHAIN
        return min(LONGEST_CHAIN, int(CHAIN_SECONDS / self._seconds_per_token))

    def _learn(self, parts: Sequence[Part], count: int, seconds: float) -> None:
        is_answering = all(running.generation.token_ids for running in self.active)
        if is_answering and all(len(part.token_ids) == part.num_lines for part in parts):  # as drafts have it
            times = self._step_times()
            for num_tokens in {len(part.token_ids) for part in parts}:
                times.learn(num_tokens, seconds / count)
        if all(len(part.token_ids) == 1 for part in parts):
            before, now = self._seconds_per_token, seconds / count
            is_less = before == 0 or now < before  # the first ones also build the table
            self._seconds_per_token = now if is_less else before + SMOOTHING * (now - before)

    def _step_times(self) -> StepTimes:
        """Of steps of so many rows, so many of them with masks and so many with filters: those take time, too."""
        num_constrained = sum(running.constraint is not None for running in self.active)
        num_greedy = sum(running.params.temperature == 0 for running in self.active)
        return self._context.step_times[len(self.active), num_constrained, num_greedy]

    def _accept(self, running: Running, token_ids: Sequence[int]) -> Iterator[tuple[Running, Piece]]:
        for token_id in token_ids:
            piece = running.attempt(partial(running.accept, token_id), None)
            if piece is None:
                return
            yield running, piece
            if running.is_finished():
                return

    def _settle_chain(
        self, running: Running, token_ids: Sequence[int], clock: Clock
    ) -> Iterator[tuple[Running, Piece]]:
        """The chain has committed all but its last token: what stands behind a stop is taken back."""
        num_before = len(running.generation.token_ids)
        try:
            yield from self._accept(running, token_ids)
        finally:
            num_said = len(running.generation.token_ids) - num_before
            if max(1, num_said) < len(token_ids):
                length = self._context.lengths[running.row] - len(token_ids) + max(1, num_said)
                self._context.truncate(running.row, length)
            running.pending = list(token_ids[max(0, num_said - 1) : num_said])
            running.chained(num_said, clock)

    def _settle(
        self, running: Running, part: Part, sampled: SampledTokens, clock: Clock
    ) -> Iterator[tuple[Running, Piece]]:
        num_before = len(running.generation.token_ids)
        num_known, has_failed = len(part.token_ids) - part.num_drafts, False
        try:
            yield from self._accept(running, sampled.token_ids)
        except GeneratorExit:
            raise
        except BaseException:
            has_failed = True
            raise
        finally:
            num_said = len(running.generation.token_ids) - num_before
            self._context.commit(running.row, num_known + max(0, num_said - 1))
            running.pending = sampled.token_ids[max(0, num_said - 1) : num_said]
            running.stepped(part, sampled, num_said, clock)
            if running.must_end_prompt and not has_failed:
                self._end_prompt(running)

    def _end_prompt(self, running: Running) -> None:
        """What it takes is part of the time of the next token."""
        started = self._now()
        self._context.end_prompt(running.row)
        running.must_end_prompt = False
        running.waited(self._now() - started)


def decode(running: Running, batch: Batch, on_prefill: OnPrefill | None = None) -> Generator[Piece, None, None]:
    """One generation alone in a batch: each token as it is accepted, to the end."""
    num_prompt_tokens = len(running.generation.prompt_token_ids)
    batch.add(running)
    try:
        while batch.active:
            for _, piece in batch.step():
                yield piece
            if on_prefill is not None and not running.generation.token_ids:
                on_prefill(num_prompt_tokens - len(running.pending), num_prompt_tokens)
    finally:
        batch.close()


def run_all(
    model: Transformer,
    waiting: Sequence[Running],
    num_rows: int,
    on_progress: Callable[[int, int], None],
    *,
    prefill_chunk: int = PREFILL_CHUNK,
    chain: int | None = None,
    capture: bool = True,
    settings: CacheSettings | None = None,
    on_result: OnResult | None = None,
) -> list[GenerationResult]:
    """All of them, up to num_rows at a time: who finishes leaves its row to the next. In their order."""
    if not waiting:
        return []
    num_rows = min(num_rows, len(waiting), MAX_LINES)
    capacity = max(running.generation.max_tokens for running in waiting)
    context = CachedContext(model, capacity, num_rows=num_rows, capture=capture, settings=settings)
    batch = Batch(context, model.device, prefill_chunk=prefill_chunk, chain=chain)
    free_rows, num_begun = list(range(num_rows)), 0
    try:
        while num_begun < len(waiting) or batch.active:
            while free_rows and num_begun < len(waiting):
                running = waiting[num_begun]
                running.row = free_rows.pop()
                context.truncate(running.row, 0)
                running.reuse(context.adopt(running.row, running.generation.prompt_token_ids))
                batch.add(running)
                num_begun += 1
            before = list(batch.active)
            for _ in batch.step():
                pass
            ended = [running for running in before if running not in batch.active]
            free_rows += [running.row for running in ended]
            if on_result is not None:
                for running in ended:
                    on_result(waiting.index(running), running.result())
            on_progress(num_begun - len(batch.active), len(waiting))
    finally:
        batch.close()
    return [running.result() for running in waiting]
