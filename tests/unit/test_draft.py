"""n-gram drafts against a naive search, and how many tokens a policy asks for."""

import random
import subprocess
import sys
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infer.draft import MAX_NGRAM, MIN_NGRAM, DraftPolicy, NgramDraft

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


def test_a_longer_match_is_trusted_more_until_it_proves_wrong() -> None:
    policy = DraftPolicy(15)
    policy.learn(0, 0, 1.0)
    asked = [policy.num_draft_tokens(match) for match in (2, 4, 20)]
    assert asked == sorted(asked)
    assert asked[0] < asked[-1]
    for _ in range(40):
        policy.num_draft_tokens(20)
        policy.learn(15, 0, 1.2)
    assert policy.num_draft_tokens(20) == 0
    assert policy.acceptance(4) == DraftPolicy(15).acceptance(4)


def test_the_next_look_for_a_draft_comes_sooner_where_drafts_are_right() -> None:
    policy = DraftPolicy(7)
    policy.learn(0, 0, 1.0, 8)
    for _ in range(5):
        policy.learn(7, 7, 2.0)
    assert policy.tokens_between == 1
    policy.learn(0, 0, 1.0, 64)
    assert policy.tokens_between == 16


def run(policy: DraftPolicy, steps: int, acceptance: float, cost: float) -> list[int]:
    """Drafts asked for, where each step's time is 1 + cost for each token more, and accepted as often as said."""
    asked, credit = [], 0.0
    for _ in range(steps):
        proposed = policy.num_draft_tokens()
        credit += proposed * acceptance
        accepted = min(proposed, int(credit))
        credit -= accepted
        policy.learn(proposed, accepted, 1 + cost * proposed)
        asked.append(proposed)
    return asked


def test_what_is_always_right_is_drafted_as_far_as_allowed() -> None:
    assert run(DraftPolicy(8), 60, 1.0, 0.05)[-1] == 8


def test_what_is_never_right_is_hardly_drafted_at_all() -> None:
    asked = run(DraftPolicy(8), 2000, 0.0, 0.1)
    assert sum(asked[100:]) <= 2 * (1900 / 200 + 4)


def test_dear_tokens_are_drafted_less_than_cheap_ones() -> None:
    cheap, dear = (sum(run(DraftPolicy(8), 300, 0.7, cost)[100:]) for cost in (0.02, 0.4))
    assert cheap > 2 * dear


def test_where_a_token_costs_a_step_nothing_is_drafted() -> None:
    assert sum(run(DraftPolicy(8), 400, 0.9, 1.0)[50:]) < 60


def test_drafting_comes_back_when_guesses_become_right() -> None:
    policy = DraftPolicy(8)
    run(policy, 500, 0.0, 0.1)
    assert max(run(policy, 600, 1.0, 0.1)) == 8


# Seconds of a step of so many tokens, in those of one: SmolLM2 on a CPU with AMX, one thread.
MEASURED = {1: 1.0, 2: 1.33, 3: 1.57, 4: 1.68, 5: 1.75, 8: 1.85, 9: 2.15, 16: 3.4}
RETURN_SECONDS = 0.05  # to Python, between two chains or steps


def speedup(prompt: Sequence[int], answer: Sequence[int], *, plain_chain: int = 32) -> float:
    """Of an answer with drafts over the same without, by what steps were measured to take."""

    def chain_seconds(count: int) -> float:
        return count + RETURN_SECONDS

    draft, policy, num_said, seconds = NgramDraft(prompt), DraftPolicy(), 0, 0.0
    while num_said < len(answer):
        match, rest = draft.match(), answer[num_said:]
        asked = min(policy.num_draft_tokens(match) if match else 0, len(rest) - 1)
        proposed = draft.propose(asked) if asked > 0 else []
        if proposed:
            right = next((i for i, token_id in enumerate(proposed) if token_id != rest[i]), len(proposed))
            taken = RETURN_SECONDS + float(np.interp(len(proposed) + 1, list(MEASURED), list(MEASURED.values())))
            policy.learn(len(proposed), right, taken)
            new = rest[: right + 1]
        else:
            new = rest[: policy.tokens_between]
            taken = chain_seconds(len(new))
            policy.learn(0, 0, taken / len(new), len(new))
        draft.append(new)
        num_said, seconds = num_said + len(new), seconds + taken
    num_chains, last = divmod(len(answer), plain_chain)
    return (num_chains * chain_seconds(plain_chain) + (chain_seconds(last) if last else 0)) / seconds


def words(rng: random.Random, count: int, num_words: int) -> list[int]:
    """As often as words of a language: the n-th one time in n. Pairs and triples come back, what follows differs."""
    return rng.choices(range(num_words), [1 / (1 + rank) for rank in range(num_words)], k=count)


@pytest.mark.parametrize("num_words", [30, 300, 3000])
def test_guesses_that_go_wrong_cost_less_than_a_fiftieth(num_words: int) -> None:
    rng = random.Random(num_words)
    speedups = [speedup(words(rng, 200, num_words), words(rng, 300, num_words)) for _ in range(8)]
    assert min(speedups) > 0.98


def test_a_copy_is_three_times_as_fast_and_an_edited_one_twice() -> None:
    rng = random.Random(1)
    prompt = words(rng, 300, 3000)
    edited = [token_id if index % 24 else 5000 for index, token_id in enumerate(prompt)]
    assert speedup(prompt, prompt) > 3
    assert speedup(prompt, edited) > 2


def test_one_step_that_was_held_up_changes_little() -> None:
    policy = DraftPolicy(4)
    run(policy, 100, 0.9, 0.1)
    wanted = policy.num_draft_tokens()
    policy.learn(0, 0, 1000.0)
    assert policy.step_seconds(1) < 1.3
    assert policy.num_draft_tokens() >= wanted - 1


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 8), st.floats(0, 10)), max_size=40), st.integers(0, 8))
def test_a_policy_asks_within_bounds_whatever_it_learns(steps: list[tuple[int, float]], most: int) -> None:
    policy = DraftPolicy(most)
    for proposed, seconds in steps:
        policy.learn(proposed, proposed // 2, seconds)
        assert 0 <= policy.num_draft_tokens() <= most
        assert all(0 < policy.acceptance(match) <= 1 for match in range(40))
        assert policy.tokens_between >= 1
        assert all(policy.step_seconds(tokens) > 0 for tokens in range(1, 12)) or not any(s for _, s in steps)


def test_nothing_wrong_is_learnt() -> None:
    with pytest.raises(ValueError, match="accepted"):
        DraftPolicy().learn(2, 3, 1.0)
    with pytest.raises(ValueError, match="max_draft_tokens"):
        DraftPolicy(-1)


def test_drafts_load_no_torch() -> None:
    code = "import sys, infer.draft; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
