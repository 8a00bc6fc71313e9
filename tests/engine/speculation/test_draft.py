"""n-gram drafts against a naive search."""

from collections.abc import Iterable

from hypothesis import given, settings
from hypothesis import strategies as st

from cases import cases
from infer.engine.speculation.ngram import MAX_MATCH, MAX_NGRAM, MIN_NGRAM, NgramDraft, NgramDrafter

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
        naive.append(token_id)
        follow(draft, [token_id])
    assert (draft.propose(max_tokens), draft.num_new) == (naive.propose(max_tokens), 0)


@settings(max_examples=60, deadline=None)
@given(token_ids, token_ids)
def test_the_next_tokens_show_the_guesses(prompt: list[int], said: list[int]) -> None:
    draft, asked = NgramDraft(list(prompt)), NgramDraft(list(prompt))
    for token_id in said:
        proposed, match = asked.propose(1), asked.match()
        assert follow(draft, [token_id]) == [(match, proposed == [token_id])]
        follow(asked, [token_id])
        assert draft.propose(9) == asked.propose(9)


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
        drafter.begin(slot, ids[slot])
    for tokens in said:
        for slot, draft in enumerate(alone):
            ids[slot] += tokens
            found = [follow(draft, [token_id])[0] for token_id in tokens]
            assert (drafter.observe(slot), drafter.confidence(slot)) == (found, draft.match())
        assert drafter.propose({0: 5, 1: 3}) == {0: alone[0].propose(5), 1: alone[1].propose(3)}
    drafter.release(0)
    drafter.release(0)
    assert drafter.propose({1: 4}) == {1: alone[1].propose(4)}
