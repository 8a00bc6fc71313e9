"""Drafts of a smaller model with the same vocabulary, or of the model's own head, over a cache of its own.

The cache has a row per slot of the engine. A row has the end of a sequence's text: reading the whole of a long prompt
would take longer than its drafts save. The draft model samples with the noise of the engine's own positions, so that
its drafts are often right with a temperature, too. Penalties and grammars are left out: they change what is right, and
the engine verifies every draft.

A head (`models.layers.extra_inputs`) reads each token with the model's state before it, so it can only read tokens
whose states the runner has kept. It guesses further tokens after its own states, and reads them again once they are
right.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from math import inf
from operator import eq
from typing import Any, final

from infer.compute.operands.step import Chunk
from infer.compute.ops import SampledStep
from infer.compute.sampling.columns import SamplingColumns
from infer.compute.sampling.noise import shifted_seed
from infer.engine.runner.runner import Runner
from infer.engine.runner.token_states import HeadInput
from infer.engine.speculation.policy import Guess, Priors, Stake
from infer.sampling_params import CONSTRAINTS, SamplingParams

FIRST_TOKENS = 64  # at the end of a text, whose states are kept for a head
_FIRST_READ = 16  # tokens at the end of a text with which a draft model begins: they take less than a step
_READ_SECONDS, _LEAST_READ = 0.04, 16  # limit of reading beside one step, and the tokens that it may always have
_MOST_PENDING = 8  # tokens that are read together with the first guess
_PATIENCE = 8  # times its cost, which an answer lasts before a trial; twice as many after each wrong one
_MOST_WRONG = 20  # wrong trials that count
_CONFIDENCE = 2
_SHARES, _RATES = (0.35, 0.65), (0.3, 0.55, 0.8)
_FIRST_SHARE, _SHARE_GAIN = 0.6, 0.03
# Parameters with which a draft would take longer, or that only apply to a whole answer.
_NOT_DRAFTED: dict[str, Any] = {"repetition_penalty": 1.0, "frequency_penalty": 0.0, "presence_penalty": 0.0}
_NOT_DRAFTED |= {"min_new_tokens": 0, "stop_token_ids": None, "logprobs": None, **dict.fromkeys(CONSTRAINTS)}
_GAIN = 0.3  # of a new measurement of the draft model's speed


@dataclass
class _Row:
    """One sequence. The draft model's row has its tokens from position `start` on; None: it has none yet."""

    token_ids: list[int]  # the sequence's own
    params: SamplingParams
    num_known: int
    start: int | None = None
    guesses: list[int] = field(default_factory=list)  # for the next tokens; all but the last are computed, too
    num_wrong: int = 0  # last steps whose first guess was wrong


@final
class ModelDrafter:
    """A `Drafter` that runs a draft model. Steps of all sequences that are drafted for are one batch."""

    def __init__(self, runner: Runner, vocab_size: int, head_input: HeadInput | None = None) -> None:
        """Begin with empty rows. Ids from `vocab_size` on are never drafted. A head has a `head_input`."""
        self.runner, self.head_input = runner, head_input
        self._vocab_size = min(vocab_size, runner.model.architecture.vocab_size)
        self._columns = SamplingColumns(runner.num_slots, self._vocab_size, device=runner.model.device)
        self._rows: dict[int, _Row] = {}
        self._stake, self._share = Stake(), _FIRST_SHARE
        self._seconds_per_token = 0.0  # of reading
        self._pass_seconds: dict[int, float] = {}  # of one draft for each row, by the number of rows

    @property
    def priors(self) -> Priors:
        """The rates of a draft model, at the share of right guesses in earlier sequences."""
        return Priors(_SHARES, {_CONFIDENCE: _RATES}, share=self._share, is_steady=True)

    @property
    def unwritten_bytes(self) -> int:
        """Bytes of the cache that take memory when they are first written; 0 if the device has taken them."""
        model, cache = self.runner.model, self.runner.cache
        return cache.num_bytes if model.backend.computes_on_host else 0

    def begin(self, slot: int, token_ids: list[int], params: SamplingParams) -> None:
        self._rows[slot] = _Row(token_ids, params, len(token_ids))
        if self.head_input is not None:
            self.head_input.begin(slot)

    def confidence(self, slot: int) -> int:
        token_ids = self._rows[slot].token_ids
        is_readable = self.head_input is None or self.head_input.has_read(slot, len(token_ids))
        return _CONFIDENCE if is_readable and token_ids[-1] < self._vocab_size else 0

    def seconds(self, slot: int, count: int) -> float:
        if not self._stake.allows(self.reading_seconds(slot)):
            return inf
        num_rows = len(self._rows)
        return count * self._pass_seconds.get(num_rows, self._pass_seconds.get(1, 0.0)) / num_rows

    def reading_seconds(self, slot: int) -> float:
        return self._num_unread(slot) * self._seconds_per_token

    def trial(self, slot: int, horizon_seconds: float) -> int:
        """Return 1 or 0: a single draft already pays for itself if it is as often right as a draft model usually is."""
        cost = self.seconds(slot, 1) + self.reading_seconds(slot)
        least = _PATIENCE * cost * 2 ** self._rows[slot].num_wrong
        return int(horizon_seconds > least and self._stake.allows(cost + self._stake.pace))

    def trim(self) -> int:
        return self.runner.cache.give_back_free()

    def account(self, gained: float, elapsed: float, pace: float) -> None:
        self._stake.account(gained, elapsed, pace)

    def propose(self, counts: Mapping[int, int]) -> dict[int, list[int]]:
        """Return the drafts of each slot. A slot whose text is still to be read gets none, and is read further."""
        ready, most, budget = dict[int, list[int]](), max(counts.values(), default=0), FIRST_TOKENS
        if self._seconds_per_token:  # how many tokens of texts may be read beside one step
            budget = max(_LEAST_READ, int(_READ_SECONDS / self._seconds_per_token))
        for slot in counts:  # each row that is ready computes as many guesses
            self._rows[slot].guesses = []
            pending = self._pending(slot, most)
            if len(pending) > _MOST_PENDING:
                budget -= self._read(slot, pending[:-1][: max(0, budget)])
                pending = self._pending(slot, most)
            has_room = 0 < len(pending) <= _MOST_PENDING and len(ready) < self.runner.model.step_limits.logits
            if has_room and not self.runner.cache.try_reserve(slot, len(pending) + most):
                ready[slot] = pending
        if ready:
            self._draft(ready, most)
        return {slot: self._rows[slot].guesses[: counts[slot]] for slot in ready}

    def observe(self, slot: int) -> list[Guess | None]:
        row = self._rows[slot]
        new, guesses = row.token_ids[row.num_known :], row.guesses
        row.num_known, row.guesses = len(row.token_ids), []
        if guesses and new:
            num_right = sum(1 for _ in takewhile(bool, map(eq, guesses, new)))
            row.num_wrong = 0 if num_right else min(row.num_wrong + 1, _MOST_WRONG)
            if self.head_input is None:
                self.runner.commit(slot, min(num_right, len(guesses) - 1))
            made = [Guess(_CONFIDENCE, left == right) for left, right in zip(guesses, new, strict=False)]
            made = made[: num_right + 1]
            for guess in made:
                self._share += _SHARE_GAIN * (guess.is_right - self._share)
            return [*made, *[None] * (len(new) - len(made))]
        return [None] * len(new)

    def release(self, slot: int) -> None:
        if self._rows.pop(slot, None) is not None:
            self.runner.cache.truncate(slot, 0)
            if self.head_input is not None:
                self.head_input.release(slot)
        if not self._rows:
            self.runner.cache.reset()  # a step may have raised

    # Reading

    def _num_unread(self, slot: int) -> int:
        """Return the number of tokens to read before the row's first guess, without the few that a guess reads."""
        row = self._rows[slot]
        num_known = self._first(slot) if row.start is None else row.start + self.runner.lengths[slot]
        num_tokens = len(row.token_ids) - num_known
        return num_tokens if num_tokens > _MOST_PENDING else 0

    def _first(self, slot: int) -> int:
        """Return the position from which a text is read."""
        first, most = 0, _FIRST_READ
        if self.head_input is not None:
            first, most = self.head_input.first(slot), FIRST_TOKENS
        return max(first, len(self._rows[slot].token_ids) - min(most, self.runner.cache.capacity // 2))

    def _pending(self, slot: int, count: int) -> list[int]:
        """Return the tokens that the row lacks.

        It begins again if it is full, after a token that only the model has, or if a head lacks states of the next one.

        The row begins with another seed, so that its noise is that of the sequence's positions.
        """
        row = self._rows[slot]
        start, capacity = row.start, self.runner.cache.capacity
        if start is not None and len(row.token_ids) + count - start > capacity:
            start = None
        if start is not None and self.head_input and start + self.runner.lengths[slot] < self.head_input.first(slot):
            start = None
        begin = self._first(slot) if start is None else start + self.runner.lengths[slot]
        pending = row.token_ids[begin:]
        if (num_foreign := next((i for i in range(len(pending), 0, -1) if pending[i - 1] >= self._vocab_size), 0)) > 0:
            start, begin, pending = None, begin + num_foreign, pending[num_foreign:]
        if start is None:
            self.runner.cache.truncate(slot, 0)
            row.start = begin
            self._columns.write(slot, self._draft_params(row.params, begin), 0)
        return pending

    def _draft_params(self, params: SamplingParams, start: int) -> SamplingParams:
        """Return the parameters that choose the likeliest drafts of a row that begins at position `start`."""
        allowed = params.allowed_token_ids
        return replace(
            params,
            **_NOT_DRAFTED,
            seed=shifted_seed(params.seed or 0, start),
            logit_bias={each: bias for each, bias in (params.logit_bias or {}).items() if each < self._vocab_size}
            or None,
            allowed_token_ids=[each for each in allowed or () if each < self._vocab_size] or None,
        )

    def _read(self, slot: int, token_ids: Sequence[int]) -> int:
        """Read tokens if there are pages for them, and return their number."""
        if not token_ids or self.runner.cache.try_reserve(slot, len(token_ids)):
            return 0
        started = time.perf_counter()
        self._write_inputs([Chunk(slot, token_ids)])
        self.runner.extend(slot, token_ids)
        self._seconds_per_token = _mean(self._seconds_per_token, (time.perf_counter() - started) / len(token_ids))
        return len(token_ids)

    # Drafts

    def _draft(self, pending: Mapping[int, Sequence[int]], count: int) -> None:
        """Guess `count` tokens for each slot, after reading its last tokens. All but the last guess are computed."""
        started, runner = time.perf_counter(), self.runner
        self._columns.select(list(pending))
        chunks = [Chunk(slot, token_ids) for slot, token_ids in pending.items()]
        self._write_inputs(chunks)
        first = runner.launch(self._step_of(chunks)).wait().token_ids
        for chunk in chunks:
            runner.commit(chunk.row, len(chunk.token_ids))
        if count > 1 and all(token_ids[0] >= 0 for token_ids in first):
            chunks = [Chunk(chunk.row, token_ids) for chunk, token_ids in zip(chunks, first, strict=True)]
            further = self._further(chunks, count - 1)
            first = [[*token_ids, *more] for token_ids, more in zip(first, further or [[]] * len(first), strict=True)]
        for chunk, token_ids in zip(chunks, first, strict=True):
            self._rows[chunk.row].guesses = list(takewhile(lambda token_id: token_id >= 0, token_ids))
        seconds = (time.perf_counter() - started) / max(map(len, first))
        self._pass_seconds[len(pending)] = _mean(self._pass_seconds.get(len(pending), 0.0), seconds)

    def _further(self, chunks: Sequence[Chunk], count: int) -> list[list[int]]:
        """Guess `count` tokens more after the first guesses, which are the chunks."""
        if self.head_input is None:
            return self.runner.multi_step(self._step_of(chunks), count).token_ids
        lengths = [self.runner.lengths[chunk.row] for chunk in chunks]
        guesses, slots = [[chunk.token_ids[0]] for chunk in chunks], [chunk.row for chunk in chunks]
        try:
            while len(guesses[0]) <= count and min(own[-1] for own in guesses) >= 0:
                chunks = [Chunk(slot, own[-1:]) for slot, own in zip(slots, guesses, strict=True)]
                self.head_input.write_guesses(chunks)
                sampled = self.runner.launch(self._step_of(chunks)).wait().token_ids
                for slot, own, (token_id,) in zip(slots, guesses, sampled, strict=True):
                    self.runner.commit(slot, 1)
                    own.append(token_id)
        finally:
            for slot, length in zip(slots, lengths, strict=True):
                self.runner.cache.truncate(slot, length)
        return [own[1:] for own in guesses]

    def _step_of(self, chunks: Sequence[Chunk]) -> SampledStep:
        return SampledStep(chunks, self.runner.starts(chunks), self._columns)

    def _write_inputs(self, chunks: Sequence[Chunk]) -> None:
        """Set the states that a head reads with the next tokens of its rows."""
        if self.head_input is not None:
            places = [(self._rows[chunk.row].start or 0) + self.runner.lengths[chunk.row] for chunk in chunks]
            self.head_input.write(chunks, places)


def _mean(known: float, seconds: float) -> float:
    """Return the mean of measured seconds, in which the last ones count most. 0 means that none is known."""
    return seconds if not known else known + _GAIN * (seconds - known)
