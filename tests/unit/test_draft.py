"""n-gram drafts against a naive search, and how many tokens a policy asks for."""

import random
import subprocess
import sys
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infer.draft import MAX_MATCH, MAX_NGRAM, MIN_NGRAM, DraftPolicy, NgramDraft, StepTimes

token_ids = st.lists(st.integers(0, 3), max_size=60)


def propose_naively(ids: list[int], max_tokens: int) -> list[int]:
    """What followed the latest earlier occurrence of the longest ending, again and again."""
    for size in range(MAX_NGRAM, MIN_NGRAM - 1, -1):
        ending = ids[-size:]
        places = [end for end in range(size, len(ids)) if ids[end - size : end] == ending]
        if len(ids) >= size and places:
            proposed: list[int] = []
            while len(proposed) < max_tokens:
                proposed += ids[places[-1] :]
            return proposed[:max_tokens]
    return []


@settings(max_examples=60, deadline=None)
@given(token_ids, st.lists(token_ids, max_size=6), st.integers(0, 12))
def test_proposals_are_those_of_a_naive_search(prompt: list[int], parts: list[list[int]], max_tokens: int) -> None:
    draft, ids = NgramDraft(prompt), list(prompt)
    for part in parts:
        assert draft.propose(max_tokens) == propose_naively(ids, max_tokens)
        draft.append(part)
        ids += part
    assert draft.propose(max_tokens) == propose_naively(ids, max_tokens)
    assert len(draft) == len(ids)


@settings(max_examples=60, deadline=None)
@given(token_ids, st.lists(st.tuples(token_ids, st.integers(0, 80)), max_size=8))
def test_dropped_is_never_appended(prompt: list[int], moves: list[tuple[list[int], int]]) -> None:
    draft, ids = NgramDraft(prompt), list(prompt)
    for part, num_dropped in moves:
        draft.append(part)
        ids += part
        num_dropped = min(num_dropped, len(ids))
        draft.drop(num_dropped)
        ids = ids[: len(ids) - num_dropped]
        fresh = NgramDraft(ids)
        assert draft.propose(10) == fresh.propose(10) == propose_naively(ids, 10)
        assert draft._end_by_ngram == fresh._end_by_ngram


def test_more_than_there_is_cannot_be_dropped() -> None:
    with pytest.raises(ValueError, match="num_tokens"):
        NgramDraft([1, 2]).drop(3)


def test_a_copy_goes_on_to_its_end_and_a_new_ending_proposes_nothing() -> None:
    draft = NgramDraft([10, 11, 12, 13, 14, 15, 1])
    assert draft.propose(4) == []
    draft.append([11, 12])
    assert draft.propose(3) == [13, 14, 15]
    draft.append([13, 14, 15, 1])
    assert draft.propose(3) == [11, 12, 13]


def test_the_longest_ending_wins_over_the_latest() -> None:
    assert NgramDraft([1, 2, 3, 4, 50, 9, 3, 4, 60, 1, 2, 3, 4]).propose(1) == [50]


@pytest.mark.parametrize(
    ("ids", "match"),
    [
        ([1, 2, 3], 0),
        ([1, 2, 9, 1, 2], 2),
        ([5, 1, 2, 9, 6, 1, 2], 2),
        ([4, 3, 1, 2, 9, 4, 3, 1, 2], 4),
        ([7] * 50, 32),
    ],
)
def test_a_match_counts_the_tokens_that_agree(ids: list[int], match: int) -> None:
    assert NgramDraft(ids).match() == match


@settings(max_examples=60, deadline=None)
@given(token_ids, token_ids)
def test_what_follows_tells_what_would_have_been_guessed(prompt: list[int], said: list[int]) -> None:
    draft, asked = NgramDraft(prompt), NgramDraft(prompt)
    for token_id in said:
        proposed, match = asked.propose(1), asked.match()
        assert draft.follow(token_id) == (match, proposed == [token_id])
        asked.append([token_id])
        assert draft.propose(9) == asked.propose(9)
    draft.drop(len(said))
    assert draft._end_by_ngram == NgramDraft(prompt)._end_by_ngram


def test_a_longer_match_is_trusted_more_until_it_proves_wrong() -> None:
    policy, times = DraftPolicy(15), StepTimes()
    times.learn(1, 1.0)
    asked = [policy.num_draft_tokens(times, match) for match in (2, 4, 20)]
    assert asked == sorted(asked)
    assert asked[0] < asked[-1]
    for _ in range(40):
        policy.observe(20, False)
    assert policy.num_draft_tokens(times, 20) == 0
    assert policy.acceptance(4) == DraftPolicy(15).acceptance(4)


def test_nothing_is_verified_to_find_out_that_it_would_pay() -> None:
    policy, times = DraftPolicy(7), StepTimes()
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
    policy, times, waits = DraftPolicy(7), StepTimes(), []
    assert policy.tokens_between(times) == 1  # nothing is known yet
    times.learn(1, 1.0)
    for _ in range(40):
        policy.observe(0, False)
        waits.append(policy.tokens_between(times))
    assert waits == sorted(waits)
    assert {4, 8, 16, 64} <= set(waits)


def test_tokens_that_a_step_has_anyway_make_drafts_cheaper() -> None:
    policy, times = DraftPolicy(7), StepTimes()
    for num_tokens, seconds in ((1, 1.0), (2, 1.9), (4, 3.5), (8, 3.6), (12, 3.7)):
        times.learn(num_tokens, seconds)
    assert policy.num_draft_tokens(times, 2) == 0
    assert policy.num_draft_tokens(times, 2, 8) > 0


def run(policy: DraftPolicy, times: StepTimes, steps: int, acceptance: float, cost: float) -> list[int]:
    """Drafts asked for, where each step's time is 1 + cost for each token more, and guesses as often right as said."""
    asked, credit = [], 0.0
    for _ in range(steps):
        proposed = policy.num_draft_tokens(times)
        credit += max(1, proposed) * acceptance
        right = min(max(1, proposed), int(credit))
        credit -= right
        times.learn(proposed + 1, 1 + cost * proposed)
        for index in range(min(right + 1, max(1, proposed))):
            policy.observe(MAX_NGRAM, index < right)
        asked.append(proposed)
    return asked


def test_what_is_always_right_is_drafted_as_far_as_allowed() -> None:
    assert run(DraftPolicy(8), StepTimes(), 60, 1.0, 0.05)[-1] == 8


def test_what_is_never_right_is_not_drafted_at_all() -> None:
    assert sum(run(DraftPolicy(8), StepTimes(), 2000, 0.0, 0.1)[100:]) == 0


def test_dear_tokens_are_drafted_less_than_cheap_ones() -> None:
    cheap, dear = (sum(run(DraftPolicy(8), StepTimes(), 300, 0.7, cost)[100:]) for cost in (0.02, 0.4))
    assert cheap > 2 * dear


def test_where_a_token_costs_a_step_hardly_anything_is_drafted() -> None:
    assert sum(run(DraftPolicy(8), StepTimes(), 400, 0.9, 1.0)[50:]) < 60


def test_drafting_comes_back_when_guesses_become_right() -> None:
    policy, times = DraftPolicy(8), StepTimes()
    run(policy, times, 500, 0.0, 0.1)
    assert max(run(policy, times, 40, 1.0, 0.1)) == 8


def test_times_that_are_over_are_measured_anew() -> None:
    policy, times = DraftPolicy(8), StepTimes()
    run(policy, times, 200, 1.0, 1.5)
    asked = run(policy, times, 2000, 1.0, 0.05)
    assert asked[0] == 0
    assert asked[-1] > 0


def test_what_one_request_measured_serves_the_next() -> None:
    times = StepTimes()
    run(DraftPolicy(8), times, 100, 1.0, 0.05)
    assert run(DraftPolicy(8), times, 10, 1.0, 0.05)[2] == 8


# Seconds of a step of so many tokens, in those of one: SmolLM2 on a CPU with AMX, one thread.
MEASURED = {1: 1.0, 2: 1.33, 3: 1.57, 4: 1.68, 5: 1.75, 8: 1.85, 9: 2.15, 16: 3.4}
RETURN_SECONDS = 0.05  # to Python, between two chains or steps


def speedup(prompt: Sequence[int], answer: Sequence[int], times: StepTimes, *, plain_chain: int = 32) -> float:
    """Of an answer with drafts over the same without, by what steps were measured to take."""

    def chain_seconds(count: int) -> float:
        return count + RETURN_SECONDS

    draft, policy, num_said, seconds = NgramDraft(prompt), DraftPolicy(), 0, 0.0
    while num_said < len(answer):
        match, rest = draft.match(), answer[num_said:]
        asked = min(policy.num_draft_tokens(times, match) if match else 0, len(rest) - 1)
        proposed = draft.propose(asked) if asked > 0 else []
        if proposed:
            right = next((i for i, token_id in enumerate(proposed) if token_id != rest[i]), len(proposed))
            taken = RETURN_SECONDS + float(np.interp(len(proposed) + 1, list(MEASURED), list(MEASURED.values())))
            times.learn(len(proposed) + 1, taken)
            new = rest[: right + 1]
        else:
            new = rest[: min(policy.tokens_between(times), plain_chain)]
            taken = chain_seconds(len(new))
            times.learn(1, taken / len(new))
        for token_id in new:
            policy.observe(*draft.follow(token_id))
        num_said, seconds = num_said + len(new), seconds + taken
    num_chains, last = divmod(len(answer), plain_chain)
    return (num_chains * chain_seconds(plain_chain) + (chain_seconds(last) if last else 0)) / seconds


def words(rng: random.Random, count: int, num_words: int) -> list[int]:
    """As often as words of a language: the n-th one time in n. Pairs and triples come back, what follows differs."""
    return rng.choices(range(num_words), [1 / (1 + rank) for rank in range(num_words)], k=count)


@pytest.mark.parametrize("num_words", [30, 300, 3000])
def test_guesses_that_go_wrong_cost_less_than_a_fiftieth(num_words: int) -> None:
    rng = random.Random(num_words)
    times = StepTimes()
    speedups = [speedup(words(rng, 200, num_words), words(rng, 300, num_words), times) for _ in range(8)]
    assert min(speedups) > 0.98


def test_a_copy_is_three_times_as_fast_and_an_edited_one_twice() -> None:
    rng = random.Random(1)
    prompt = words(rng, 300, 3000)
    edited = [token_id if index % 24 else 5000 for index, token_id in enumerate(prompt)]
    assert speedup(prompt, prompt, StepTimes()) > 3
    assert speedup(prompt, edited, StepTimes()) > 2


def test_one_step_that_was_held_up_changes_little() -> None:
    policy, times = DraftPolicy(4), StepTimes()
    run(policy, times, 100, 0.9, 0.1)
    wanted = policy.num_draft_tokens(times)
    times.learn(1, 1000.0)
    assert times.seconds(1) < 1.3
    assert policy.num_draft_tokens(times) >= wanted - 1


def test_a_first_step_that_took_long_is_soon_forgotten() -> None:
    times = StepTimes()
    times.learn(1, 100.0)
    for _ in range(10):
        times.learn(1, 1.0)
    assert times.seconds(1) < 2


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 9), st.floats(0, 10), st.integers(0, 40), st.booleans()), max_size=40),
    st.integers(0, 8),
)
def test_a_policy_asks_within_bounds_whatever_it_learns(steps: list[tuple[int, float, int, bool]], most: int) -> None:
    policy, times = DraftPolicy(most), StepTimes()
    for num_tokens, seconds, match, is_right in steps:
        times.learn(num_tokens, seconds)
        policy.observe(min(match, MAX_MATCH), is_right)
        assert 0 <= policy.num_draft_tokens(times, match) <= most
        assert all(0 < policy.acceptance(match) <= 1 for match in range(40))
        assert policy.tokens_between(times) >= 1
        assert all(times.seconds(count) > 0 for count in range(1, 12))


def test_a_policy_drafts_no_negative_number() -> None:
    with pytest.raises(ValueError, match="max_draft_tokens"):
        DraftPolicy(-1)


def test_drafts_load_no_torch() -> None:
    code = "import sys, infer.draft; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
