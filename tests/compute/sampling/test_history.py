"""Claims about the history: its tables agree with a list of ids, as they grow and after a restart."""

import sys

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from infer.compute.sampling.columns import WHOLE_HISTORY
from infer.compute.sampling.history import History
from infer.errors import InvalidRequestError
from sampling_cases import tables, tables_of
from watched import run_python

CAPACITY, NUM_SLOTS = 24, 3
WINDOWS = (0, 1, 2, 5, CAPACITY, WHOLE_HISTORY)


class HistoryMachine(RuleBasedStateMachine):
    """Compare any order of restarts and appends to some slots with plain lists."""

    @initialize(vocab_size=st.sampled_from([1, 2, 7]))
    def start(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.history = History(NUM_SLOTS, CAPACITY, vocab_size)
        self.lists: list[list[int]] = [[] for _ in range(NUM_SLOTS)]
        self.prompts = [0] * NUM_SLOTS
        self.addresses = [x.data_ptr() for x in self.read_by_kernels()]

    def read_by_kernels(self) -> list[torch.Tensor]:
        history = self.history
        return [history.tokens, history.last, history.counts, history.lengths]

    def draw_slots(self, data: st.DataObject, fit: list[int]) -> list[int]:
        return data.draw(st.lists(st.sampled_from(fit), unique=True)) if fit else []

    @rule(data=st.data(), slot=st.integers(0, NUM_SLOTS - 1))
    def begin(self, data: st.DataObject, slot: int) -> None:
        ids = data.draw(st.lists(st.integers(0, self.vocab_size - 1), max_size=CAPACITY))
        prompt = data.draw(st.none() | st.integers(0, len(ids)))
        self.history.begin(slot, ids, prompt)
        self.lists[slot], self.prompts[slot] = ids, len(ids) if prompt is None else prompt

    @rule(data=st.data())
    def append(self, data: st.DataObject) -> None:
        slots = self.draw_slots(data, [i for i in range(NUM_SLOTS) if len(self.lists[i]) < CAPACITY])
        tokens = [data.draw(st.integers(0, self.vocab_size - 1)) for _ in slots]
        self.history.append(torch.tensor(slots, dtype=torch.int64), torch.tensor(tokens, dtype=torch.int64))
        for slot, token_id in zip(slots, tokens, strict=True):
            self.lists[slot] = [*self.lists[slot], token_id]

    @rule(data=st.data(), slot=st.integers(0, NUM_SLOTS - 1))
    def extend(self, data: st.DataObject, slot: int) -> None:
        room = CAPACITY - len(self.lists[slot])
        ids = data.draw(st.lists(st.integers(0, self.vocab_size - 1), max_size=min(room, 6)))
        self.history.extend(slot, ids)
        self.lists[slot] = [*self.lists[slot], *ids]

    @invariant()
    def the_tables_say_what_the_lists_say(self) -> None:
        for slot in range(NUM_SLOTS):
            expected = tables_of(self.lists[slot], self.prompts[slot], self.vocab_size)
            assert tables(self.history, slot) == expected

    @invariant()
    def the_tables_stay_where_they_are(self) -> None:
        assert [x.data_ptr() for x in self.read_by_kernels()] == self.addresses


TestHistory = HistoryMachine.TestCase
TestHistory.settings = settings(max_examples=25, stateful_step_count=20, deadline=None)


def test_a_slot_does_not_see_another() -> None:
    history = History(2, 20, 5)
    history.begin(0, [1, 2, 3])
    expected = tables(history, 0)
    history.begin(1, [3, 3, 3], 1)
    history.append(torch.tensor([1]), torch.tensor([2]))
    assert tables(history, 0) == expected


SPARSE = """
import resource
import torch
from infer.compute.sampling.history import History
def resident_bytes():
    return int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize()
before = resident_bytes()
history = History(64, 131_072, 262_144)
history.begin(3, range(1000), 500)
history.append(torch.tensor([3]), torch.tensor([7]))
assert history.last[3, [7, 999]].tolist() == [1001, 1000]
print(resident_bytes() - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="hardware: a system that tells what is resident")
def test_only_slots_that_had_a_penalty_take_memory() -> None:
    """64 slots of 262,144 words and 131,072 positions are 168 MB. A new process has no memory of other tests."""
    done = run_python(SPARSE)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 32e6


def test_the_remains_of_an_interrupt_are_gone_after_a_restart(monkeypatch: pytest.MonkeyPatch) -> None:
    history = History(1, 20, 5)
    history.begin(0, [1, 2])
    for table in ("last", "counts"):
        kept = getattr(history, table)
        monkeypatch.setattr(history, table, _Interrupted())
        with pytest.raises(KeyboardInterrupt):
            history.append(torch.tensor([0]), torch.tensor([4]))
        monkeypatch.setattr(history, table, kept)
    history.begin(0, [3])
    assert tables(history, 0) == tables_of([3], 1, 5)


class _Interrupted:
    def __setitem__(self, index: object, value: object) -> None:
        raise KeyboardInterrupt

    def __getitem__(self, index: object) -> torch.Tensor:
        return torch.zeros(1, dtype=torch.int32)


@pytest.mark.parametrize("token_id", [-1, 5, 10**12])
def test_an_id_outside_the_vocabulary_is_an_error_naming_it(token_id: int) -> None:
    history = History(1, 20, 5)
    history.begin(0, [1, 2])
    expected = tables(history, 0)
    with pytest.raises(InvalidRequestError, match=rf"must be in \[0, 5\), the vocabulary, got {token_id}"):
        history.begin(0, [0, token_id, 1])
    assert tables(history, 0) == expected


def test_more_than_the_capacity_is_an_error() -> None:
    with pytest.raises(InvalidRequestError, match="a history of 4 tokens does not fit the capacity of 3"):
        History(1, 3, 5).begin(0, [0, 1, 2, 3])


@pytest.mark.parametrize("count", [-1, 3])
def test_a_prompt_longer_than_the_history_is_an_error(count: int) -> None:
    with pytest.raises(InvalidRequestError, match=rf"num_prompt_tokens must be in \[0, 2\], got {count}"):
        History(1, 3, 5).begin(0, [0, 1], count)
