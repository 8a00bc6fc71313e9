"""An engine with a drafter other than n-grams, which proposes for all sequences in one batch."""

from collections.abc import Mapping
from dataclasses import replace

import pytest

from infer.engine.engine import Engine
from infer.engine.runner.runner import Runner
from infer.engine.speculation.drafter import Guess, Priors
from infer.sampling_params import SamplingParams
from path_cases import CONTEXT, Case, Outcome, Way, World, all_by_definition, check_ends, make_sequence

GREEDY = SamplingParams(temperature=0, max_new_tokens=24, ignore_eos=True)


class BatchDrafter:
    """Knows the answers. `batches` has the slots of each call of `propose`."""

    priors = Priors((0.2, 0.5), {1: (0.9, 0.9, 0.9), 2: (0.99, 0.99, 0.99)})

    def __init__(self, texts: list[list[int]]) -> None:
        self._texts, self._num_known = texts, dict[int, int]()
        self.rows: dict[int, tuple[list[int], list[int]]] = {}  # the whole text, and the ids so far
        self.batches, self.guesses = list[set[int]](), list[Guess]()

    def begin(self, slot: int, token_ids: list[int]) -> None:
        (text,) = (text for text in self._texts if text[: len(token_ids)] == token_ids)
        self.rows[slot], self._num_known[slot] = (text, token_ids), len(token_ids)

    def confidence(self, slot: int) -> int:
        return 2

    def propose(self, counts: Mapping[int, int]) -> dict[int, list[int]]:
        self.batches.append(set(counts))
        rows = {slot: self.rows[slot] for slot in counts}
        return {slot: text[len(ids) :][: counts[slot]] for slot, (text, ids) in rows.items()}

    def observe(self, slot: int) -> list[Guess]:
        text, ids = self.rows[slot]
        start, self._num_known[slot] = self._num_known[slot], len(ids)
        found = [Guess(2, text[index] == ids[index]) for index in range(start, len(ids))]
        self.guesses += found
        return found

    def release(self, slot: int) -> None:
        del self.rows[slot]


@pytest.mark.parametrize("preempts", [False, True])
def test_a_drafter_proposes_for_all_sequences_in_one_batch_and_changes_no_token(world: World, preempts: bool) -> None:
    prompts = [tuple(b"abc abcab"), tuple(b"xyz"), tuple(b"hello world")]
    cases = [Case(str(index), prompt, GREEDY) for index, prompt in enumerate(prompts)]
    expected = all_by_definition(world, cases)
    drafter = BatchDrafter([[*case.prompt, *outcome.token_ids] for case, outcome in zip(cases, expected, strict=True)])
    engine = Engine(Runner(world.model, CONTEXT, num_slots=3), drafter=drafter)
    waiting = [engine.submit(make_sequence(world, case, Way("adaptive"))) for case in cases]
    num_steps = 0
    while engine.step():
        num_steps += 1
        if preempts and num_steps == 3:
            assert engine._slots.preempt_one()
            assert len(drafter.rows) == 2
    results = [sequence.result() for sequence in waiting]
    assert ([Outcome.of(result) for result in results], max(map(len, drafter.batches))) == (expected, 3)
    assert len(drafter.batches) < num_steps
    assert sum(result.stats.drafts_accepted for result in results) > 30
    assert all(guess.is_right for guess in drafter.guesses)
    assert not drafter.rows


def test_a_sequence_without_drafts_is_never_begun(world: World) -> None:
    drafter = BatchDrafter([])
    engine = Engine(Runner(world.model, CONTEXT, num_slots=2), drafter=drafter)
    case = Case("", tuple(b"abc"), replace(GREEDY, max_new_tokens=4))
    check_ends(world, engine, [engine.submit(make_sequence(world, case, Way("none")))], [case])
    assert drafter.batches == []
