"""A step takes at most the chunk of each sequence, and every sequence advances, over plans of every kind."""

from collections.abc import Sequence
from typing import NamedTuple

from hypothesis import given, settings
from hypothesis import strategies as st

from infer.compute.operands.limits import HOST_STEP
from infer.engine.step.scheduler import FIRST_STEPS, Demand, Plan, Scheduler

MOST_ROWS = 8


class Row(NamedTuple):
    pending: int
    num_drafts: int
    max_steps: int


ROWS = st.builds(
    Row,
    pending=st.one_of(st.just(1), st.integers(2, 40), st.integers(100, 5000)),
    num_drafts=st.sampled_from([0, 0, 1, 8, 15]),
    max_steps=st.sampled_from([1, 3, 20, 1000]),
)


def plan(rows: Sequence[Row], step_tokens: int) -> Plan:
    scheduler = Scheduler(HOST_STEP, 64)
    most, demands = scheduler.max_drafts(len(rows)), list[Demand]()
    for pending, num_drafts, max_steps in rows:
        demands.append(Demand(pending, min(num_drafts, most), max_steps, number=len(demands)))
    return scheduler.plan(demands, step_tokens)


@settings(max_examples=300, deadline=None)
@given(rows=st.lists(ROWS, min_size=1, max_size=MOST_ROWS), chunk=st.sampled_from([1, 2, 7, 16, 64, 512]))
def test_no_step_is_longer_than_its_chunk_and_every_sequence_gets_on(rows: list[Row], chunk: int) -> None:
    num_tokens, num_drafts, num_steps, work = plan(rows, chunk)
    assert work.num_tokens == sum(num_tokens) + sum(num_drafts)
    decoding = [row.pending == 1 for row in rows]
    assert sum(num_tokens) + sum(num_drafts) <= max(chunk, sum(decoding) + (not all(decoding)))
    has_logits = [count == row.pending for count, row in zip(num_tokens, rows, strict=True)]
    assert sum(1 + count for count, has in zip(num_drafts, has_logits, strict=True) if has) <= HOST_STEP.logits
    assert all(count >= 1 for count, decodes in zip(num_tokens, decoding, strict=True) if decodes)
    reading = [index for index, decodes in enumerate(decoding) if not decodes]
    assert not reading or any(num_tokens[index] for index in reading)
    rest = chunk - sum(decoding) - sum(num_drafts)
    if reading and rest >= 4:
        oldest, shortest = reading[0], min(reading, key=lambda index: rows[index].pending)
        assert num_tokens[oldest] >= 1  # although shorter ones arrive after it
        assert num_tokens[shortest] >= min(rows[shortest].pending, rest - rest // 4)
    for row, tokens, drafts, has in zip(rows, num_tokens, num_drafts, has_logits, strict=True):
        assert 0 <= tokens <= row.pending
        assert 0 <= drafts <= row.num_drafts
        assert has or not drafts
    is_plain = all(decoding) and not any(num_drafts)
    assert num_steps == (min(64, *(row.max_steps for row in rows)) if is_plain else 1)


def test_drafts_after_forced_tokens_leave_no_more_than_the_chunk_to_a_prompt() -> None:
    """There are five pending tokens of an answer, fifteen drafts after them, and a long prompt."""
    answering, reading = Row(pending=5, num_drafts=15, max_steps=1), Row(pending=4000, num_drafts=0, max_steps=1)
    for rows in ([answering, reading], [reading, answering], [answering, reading, reading]):
        found = plan(rows, 16)
        assert sum(found.num_tokens) + sum(found.num_drafts) == 16


def test_the_scheduler_learns_how_many_steps_take_a_tenth_of_a_second() -> None:
    scheduler, demands = Scheduler(HOST_STEP), [Demand(1, 0, 1000, 1000)] * 2
    first = scheduler.plan(demands, 512)
    assert first.num_steps == FIRST_STEPS
    scheduler.update(first, first.num_steps, first.num_steps * 0.004, None)
    assert scheduler.plan(demands, 512).num_steps == 25
    scheduler.update(first, 1, 5.0, None)  # a delayed step is not believed at first
    assert scheduler.plan(demands, 512).num_steps == 25
    scheduler.update(first, 1, 5.0, None)
    assert scheduler.plan(demands, 512).num_steps < 25
