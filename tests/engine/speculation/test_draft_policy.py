"""n-gram drafts against a naive search, how many of them a policy requests, and the speedup on simulated machines."""

import json
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cases import cases
from infer.engine.speculation.ngram import MAX_MATCH, MAX_NGRAM, MIN_NGRAM, PRIORS, NgramDraft, NgramDrafter
from infer.engine.speculation.policy import DraftPolicy, StepTimes
from infer.sampling_params import SamplingParams


def test_a_longer_match_is_trusted_more_until_it_proves_wrong() -> None:
    policy, times = DraftPolicy(15, PRIORS), StepTimes()
    times.learn(1, 1.0)
    asked = [policy.num_draft_tokens(times, match) for match in (2, 4, 20)]
    assert asked == sorted(asked)
    assert asked[0] < asked[-1]
    for _ in range(40):
        policy.observe(20, False)
    assert policy.num_draft_tokens(times, 20) == 0
    assert policy.acceptance(4) > 2 * policy.acceptance(20)


def test_no_draft_is_verified_only_to_learn_its_cost() -> None:
    policy, times = DraftPolicy(7, PRIORS), StepTimes()
    times.learn(1, 1.0)
    for _ in range(60):
        policy.observe(4, False)
    assert [policy.num_draft_tokens(times, 4) for _ in range(500)] == [0] * 500
    assert policy.tokens_between(times) == 64
    for _ in range(12):
        policy.observe(4, True)
    assert policy.tokens_between(times) == 1
    assert policy.num_draft_tokens(times, 4) > 0


def test_the_next_look_for_a_draft_comes_sooner_where_guesses_are_right() -> None:
    policy, times = DraftPolicy(7, PRIORS), StepTimes()
    waits = [policy.tokens_between(times)]  # nothing is known yet
    times.learn(1, 1.0)
    for _ in range(40):
        policy.observe(0, False)
        waits.append(policy.tokens_between(times))
    assert waits == sorted(waits)
    assert {1, 4, 8, 16, 64} <= set(waits)


def test_tokens_that_a_step_has_anyway_make_drafts_cheaper() -> None:
    policy, times = DraftPolicy(7, PRIORS), StepTimes()
    for _ in range(20):
        for num_tokens, seconds in ((1, 1.0), (2, 1.9), (4, 3.5), (8, 3.6), (9, 3.65), (12, 3.7)):
            times.learn(num_tokens, seconds)
    assert policy.num_draft_tokens(times, 2) == 0
    assert policy.num_draft_tokens(times, 2, 8) > 0


def run(policy: DraftPolicy, times: StepTimes, steps: int, acceptance: float, cost: float) -> list[int]:
    """Return the numbers of requested drafts. A step takes 1, and `cost` per draft. `acceptance` of them are right."""
    asked, credit = [], 0.0
    for _ in range(steps):
        proposed = policy.num_draft_tokens(times, MAX_NGRAM)
        credit += max(1, proposed) * acceptance
        right = min(max(1, proposed), int(credit))
        credit -= right
        times.learn(proposed + 1, 1 + cost * proposed)
        for index in range(min(right + 1, max(1, proposed))):
            policy.observe(MAX_NGRAM, index < right)
        asked.append(proposed)
    return asked


def test_drafts_that_are_always_right_have_the_largest_size_also_in_the_next_request() -> None:
    times = StepTimes()
    asked = run(DraftPolicy(8, PRIORS), times, 60, 1.0, 0.05)
    assert sum(number == 8 for number in asked) > 40
    assert asked[-1] == run(DraftPolicy(8, PRIORS), times, 10, 1.0, 0.05)[2] == 8


def test_drafts_that_are_never_right_are_not_made() -> None:
    assert sum(run(DraftPolicy(8, PRIORS), StepTimes(), 2000, 0.0, 0.1)[100:]) == 0


def test_dear_tokens_are_drafted_less_than_cheap_ones() -> None:
    cheap, dear = (sum(run(DraftPolicy(8, PRIORS), StepTimes(), 300, 0.7, cost)[100:]) for cost in (0.02, 0.4))
    assert cheap > 2 * dear


def test_drafting_comes_back_when_guesses_become_right() -> None:
    policy, times = DraftPolicy(8, PRIORS), StepTimes()
    run(policy, times, 500, 0.0, 0.1)
    assert max(run(policy, times, 40, 1.0, 0.1)) >= 7


def test_times_that_are_over_are_measured_anew() -> None:
    policy, times = DraftPolicy(8, PRIORS), StepTimes()
    run(policy, times, 200, 1.0, 1.5)
    asked = run(policy, times, 2000, 1.0, 0.05)
    assert asked[0] == 0
    assert sum(asked[-100:]) > 700


# Time of a step by its tokens, relative to one token: measured with SmolLM2 on two cores with AMX, and wanted.
COSTS = {"now": {1: 1.0, 2: 1.17, 4: 1.45, 8: 2.35, 16: 4.4}, "wanted": {1: 1.0, 2: 1.08, 4: 1.35, 8: 1.8, 16: 3.3}}
RETURN = 0.07  # time of a return to Python between two multi-steps or steps
PLAIN_CHAIN = 32


@dataclass
class Machine:
    """A machine whose steps take their cost and some noise. `slowed` returns a factor by time and size."""

    cost_by_tokens: dict[int, float]
    noise: float = 0.03
    slowed: Callable[[float, int, bool], float] = lambda clock, num_tokens, is_first: 1.0
    clock: float = 0.0
    seen: set[int] = field(default_factory=set)
    rng: random.Random = field(default_factory=lambda: random.Random(7))

    def step(self, num_tokens: int, count: int = 1) -> float:
        cost = count * float(np.interp(num_tokens, list(self.cost_by_tokens), list(self.cost_by_tokens.values())))
        cost *= self.rng.lognormvariate(0, self.noise)
        cost *= self.slowed(self.clock, num_tokens, num_tokens not in self.seen)
        self.seen.add(num_tokens)
        self.clock += cost + RETURN
        return cost


def drafted(prompt: Sequence[int], answer: Sequence[int], machine: Machine, times: StepTimes, fixed: int = -1) -> float:
    """Return the time of an answer with drafts of the policy's size, or of a fixed size."""
    ids = list(prompt)
    draft, policy, num_said, began = NgramDraft(ids), DraftPolicy(15, PRIORS), 0, machine.clock
    while num_said < len(answer):
        match, rest = draft.match(), answer[num_said:]
        asked = policy.num_draft_tokens(times, match) if match else 0
        asked = min(asked if fixed < 0 else fixed if match > 1 else 0, len(rest) - 1)
        proposed = draft.propose(asked) if asked > 0 else []
        if proposed:
            right = next((i for i, token_id in enumerate(proposed) if token_id != rest[i]), len(proposed))
            new = rest[: right + 1]
            times.learn(1 + len(proposed), machine.step(1 + len(proposed)))
        else:
            new = rest[: min(policy.tokens_between(times), PLAIN_CHAIN)]
            times.learn(1, machine.step(1, len(new)) / len(new))
        for token_id in new:
            ids.append(token_id)
            policy.observe(*draft.follow())
        num_said += len(new)
    return machine.clock - began


def plain(answer: Sequence[int]) -> float:
    return len(answer) + RETURN * -(-len(answer) // PLAIN_CHAIN)


class Answer(NamedTuple):
    prompt: list[int]
    said: list[int]


@cache
def said_answers() -> dict[str, Answer]:
    """Return SmolLM2's answers to the tasks of benchmarks/path_prompts.py, as ids."""
    found = json.loads((Path(__file__).parents[2] / "data" / "said_answers.json").read_text(encoding="utf-8"))
    return {each["name"]: Answer(each["prompt"], each["answer"]) for each in found}


def speedups(machine: Machine, rounds: int = 4) -> dict[str, float]:
    """Return the median speedup of each answer. All answers take turns on one machine and keep what they learnt."""
    times, found = StepTimes(), dict[str, list[float]]()
    for _ in range(rounds):
        for name, (prompt, said) in said_answers().items():
            found.setdefault(name, []).append(plain(said) / drafted(prompt, said, machine, times))
    return {name: float(np.median(each)) for name, each in found.items()}


@pytest.mark.parametrize("cost", list(COSTS))
def test_a_policy_is_as_good_as_the_best_fixed_number_for_each_answer(cost: str) -> None:
    found = speedups(Machine(COSTS[cost]))
    for name, (prompt, said) in said_answers().items():
        fixed = (drafted(prompt, said, Machine(COSTS[cost]), StepTimes(), size) for size in (0, 1, 3, 7, 15))
        assert found[name] > 0.93 * plain(said) / min(fixed), name


@pytest.mark.parametrize("cost", list(COSTS))
def test_no_answer_is_slower_than_a_fiftieth_for_its_drafts(cost: str) -> None:
    assert min(speedups(Machine(COSTS[cost], noise=0.0)).values()) > 0.98


def held_up_at_first(clock: float, num_tokens: int, is_first: bool) -> float:
    return 4.0 if is_first else 1.0


def slow_until_measured_thrice(clock: float, num_tokens: int, is_first: bool) -> float:
    return 3.0 if num_tokens > 4 and clock < 60 else 1.0


def busy_for_a_while(clock: float, num_tokens: int, is_first: bool) -> float:
    return 2.0 if clock % 200 < 50 else 1.0


@pytest.mark.parametrize("slowed", [held_up_at_first, slow_until_measured_thrice])
def test_steps_that_were_slow_once_decide_nothing_later(slowed: Callable[[float, int, bool], float]) -> None:
    quiet, slow = speedups(Machine(COSTS["now"])), speedups(Machine(COSTS["now"], slowed=slowed))
    for name in quiet:
        assert slow[name] > 0.93 * quiet[name], name


def test_a_busy_moment_slows_all_steps_and_changes_no_choice() -> None:
    """Steps of drafted answers count with the time that they would have taken on an idle machine."""
    asked = list[int]()
    for slowed in (busy_for_a_while, lambda *_: 1.0):
        machine, times = Machine(COSTS["now"], noise=0.0, slowed=slowed), StepTimes()
        policy, num_asked = DraftPolicy(15, PRIORS), 0
        for number in range(2000):
            proposed = policy.num_draft_tokens(times, 20)
            times.learn(1 + proposed, machine.step(1 + proposed))
            if number % 4 == 0:
                times.learn(1, machine.step(1))
            num_asked += proposed
        asked.append(num_asked)
    busy, quiet = asked
    assert abs(busy - quiet) < 0.1 * quiet > 1000


def test_one_delayed_step_changes_little() -> None:
    policy, times = DraftPolicy(4, PRIORS), StepTimes()
    run(policy, times, 100, 0.9, 0.1)
    wanted = policy.num_draft_tokens(times, MAX_NGRAM)
    times.learn(1, 1000.0)
    assert times.seconds(1) < 1.3
    assert policy.num_draft_tokens(times, MAX_NGRAM) >= wanted - 1


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 9), st.floats(0, 10), st.integers(0, 40), st.booleans()), max_size=40),
    st.integers(0, 8),
)
def test_a_policy_asks_within_bounds_whatever_it_learns(steps: list[tuple[int, float, int, bool]], most: int) -> None:
    policy, times = DraftPolicy(most, PRIORS), StepTimes()
    for num_tokens, seconds, match, is_right in steps:
        times.learn(num_tokens, seconds)
        policy.observe(min(match, MAX_MATCH), is_right)
        assert 0 <= policy.num_draft_tokens(times, match) <= most
        assert all(0 < policy.acceptance(match) <= 1 for match in range(40))
        assert policy.tokens_between(times) >= 1
        assert all(0 < times.promised(count) <= times.seconds(count) for count in range(1, 12))


# n-gram drafts


token_ids = st.lists(st.integers(0, 3), max_size=60)


def follow(draft: NgramDraft, token_ids: Iterable[int]) -> list[tuple[int, bool]]:
    """Let the ids grow, then update the draft, as an engine does."""
    draft._ids.extend(token_ids)
    return [draft.follow() for _ in range(draft.num_new)]


class Naive:
    """Searches the whole text again for every token. The guess at the next one is (place, match, misses)."""

    def __init__(self, prompt: list[int]) -> None:
        self.ids, self.guess = list(prompt), (-1, 0, 0)
        self.guess = self.search((-1, 0, 0))

    def search(self, goes_on: tuple[int, int, int]) -> tuple[int, int, int]:
        ids = self.ids
        for size in range(min(MAX_NGRAM, len(ids)), MIN_NGRAM - 1, -1):
            places = [end for end in range(size, len(ids)) if ids[end - size : end] == ids[-size:]]
            if places and goes_on[1] > 1 and (places[-1] == goes_on[0] or size < min(goes_on[1], MAX_NGRAM)):
                return goes_on
            if places and places[-1] != goes_on[0]:
                agree = range(1, min(MAX_MATCH, places[-1]) + 1)
                differs = (n for n in agree if ids[places[-1] - n] != ids[-n])
                return places[-1], next(differs, len(agree) + 1) - 1, 0
            if places:
                return goes_on
        return goes_on

    def append(self, token_id: int) -> None:
        place, match, misses = self.guess
        goes_on = (-1, 0, 0)
        if match and self.ids[place] == token_id:
            goes_on = (place + 1, min(MAX_MATCH, max(3, match + 1)), 0 if match >= 4 else misses)
        elif match and misses < 2:
            near = [at for at in range(place + 1, min(place + 4, len(self.ids))) if self.ids[at] == token_id]
            goes_on = ((near[0] if near else place) + 1, 1, misses + 1)
        self.ids.append(token_id)
        self.guess = self.search(goes_on)

    def propose(self, max_tokens: int) -> list[int]:
        proposed: list[int] = []
        while self.guess[1] and len(proposed) < max_tokens:
            proposed += self.ids[self.guess[0] :]
        return proposed[:max_tokens]


@settings(max_examples=100, deadline=None)
@given(token_ids, token_ids, st.integers(0, 12))
def test_proposals_are_those_of_a_naive_search(prompt: list[int], said: list[int], max_tokens: int) -> None:
    draft, naive = NgramDraft(list(prompt)), Naive(prompt)
    for token_id in said:
        assert (draft.propose(max_tokens), draft.match()) == (naive.propose(max_tokens), naive.guess[1])
        assert follow(draft, [token_id]) == [(naive.guess[1], naive.propose(1) == [token_id])]
        naive.append(token_id)
    assert (draft.propose(max_tokens), draft.num_new) == (naive.propose(max_tokens), 0)


@cases(
    "said proposed",
    ([10, 11, 99], [13, 14, 15]),  # another word in place of 12
    ([10, 11, 13], [14, 15, 16]),  # without 12
    ([10, 11, 15], [16, 17, 18]),  # without 12, 13 and 14
    ([10, 11, 99, 98], [14, 15, 16]),
    ([10, 11, 99, 98, 97], []),  # not a copy any more
    ([10, 11, 99, 13, 98], [15, 16, 17]),
)
def test_a_copy_continues_after_a_change_or_an_omission(said: list[int], proposed: list[int]) -> None:
    draft = NgramDraft([*range(10, 30), 1])
    follow(draft, said)
    assert (draft.propose(3), draft.match()) == (proposed, 1 if proposed else 0)


@settings(max_examples=60, deadline=None)
@given(token_ids, st.lists(token_ids, max_size=6))
def test_a_drafter_of_many_slots_guesses_as_each_draft_does_alone(prompt: list[int], said: list[list[int]]) -> None:
    drafter, alone = NgramDrafter(), [NgramDraft(list(prompt[slot:])) for slot in range(2)]
    ids = [list(prompt[slot:]) for slot in range(2)]
    for slot in range(2):
        drafter.begin(slot, ids[slot], SamplingParams())
    for tokens in said:
        for slot, draft in enumerate(alone):
            ids[slot] += tokens
            found = [follow(draft, [token_id])[0] for token_id in tokens]
            assert (drafter.observe(slot), drafter.confidence(slot)) == (found, draft.match())
        assert drafter.propose({0: 5, 1: 3}) == {0: alone[0].propose(5), 1: alone[1].propose(3)}
    drafter.release(0)
    drafter.release(0)
    assert drafter.propose({1: 4}) == {1: alone[1].propose(4)}
