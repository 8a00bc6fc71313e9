"""Paused answers lose their slots and pages first. A lease is lost only when others need its slot."""

import pytest

from infer.compute.kvcache.cache_settings import CacheSettings
from infer.engine.engine import Engine
from infer.engine.runner.runner import Runner
from infer.engine.step.place import Lease
from infer.engine.step.sequence import Sequence
from infer.sampling_params import SamplingParams
from path_cases import CONTEXT, Case, Way, World, check_ends, make_sequence

PARAMS = SamplingParams(temperature=0, max_new_tokens=60, ignore_eos=True)
TURN = SamplingParams(temperature=0, max_new_tokens=6, ignore_eos=True)


def make_engine(world: World, num_slots: int, pool_pages: int | None = None) -> Engine:
    sizes = {"num_slots": num_slots, "pool_pages": pool_pages, "settings": CacheSettings(page_tokens=16)}
    return Engine(Runner(world.model, CONTEXT, **sizes), max_steps=4)  # type: ignore[arg-type]


def test_a_paused_answer_gives_its_pages_before_one_that_runs(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two answers of 67 tokens fill the ten pages."""
    monkeypatch.setattr("infer.engine.step.queue.EXPECTED_ANSWER", 1)
    engine = make_engine(world, 3, pool_pages=CONTEXT // 16)
    cases = [Case("", tuple(text), PARAMS) for text in (b"abc", b"abc cab", b"cab abc")]
    paused, *running = asked = [engine.submit(make_sequence(world, case, Way())) for case in cases]
    while not paused.pieces:
        engine.step()
    engine.pause(paused)
    while not all(sequence.has_ended for sequence in running):
        engine.step()
        engine.runner.cache.check_integrity()  # type: ignore[attr-defined]
    assert [sequence.stats.preemptions for sequence in asked] == [1, 0, 0]
    engine.proceed(paused)
    check_ends(world, engine, asked, cases)
    engine.close()


class Talk:
    """Consecutive answers with one lease."""

    def __init__(self, world: World, engine: Engine, text: bytes) -> None:
        self.world, self.engine, self.lease, self.token_ids = world, engine, Lease(), list(text)

    def turn(self) -> Sequence:
        case = Case("", tuple(self.token_ids), TURN)
        sequence = self.engine.submit(make_sequence(self.world, case, Way()), self.lease)
        check_ends(self.world, self.engine, [sequence], [case])
        self.token_ids += [*sequence.generated, *b"ab"]
        return sequence


@pytest.mark.parametrize("is_reset", [False, True])
def test_leases_that_fit_are_kept_also_after_a_reset(world: World, is_reset: bool) -> None:
    engine = make_engine(world, 2)
    first, second = (Talk(world, engine, text) for text in (b"abc", b"cab "))
    assert first.turn().num_reused == 0
    if is_reset:
        engine.recover()  # as after a step that raised
    found = [talk.turn().num_reused > 0 for talk in (first, second, first, second)]
    assert found == [not is_reset, False, True, True]
    engine.close()


def test_the_lease_used_longest_ago_is_lost_when_another_needs_its_slot(world: World) -> None:
    engine = make_engine(world, 2)
    first, second, third = (Talk(world, engine, text) for text in (b"abc", b"cab ", b"bca"))
    for talk in (first, second, first, third):
        talk.turn()
    assert [talk.lease.slot is None for talk in (first, second, third)] == [False, True, False]
    assert first.turn().num_reused > 0
    assert second.turn().num_reused == 0
    assert [talk.lease.slot is None for talk in (first, second, third)] == [False, False, True]
    engine.close()
