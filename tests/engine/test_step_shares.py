"""The choice of the tenants of each step. On the tests' clock, each sequence takes as long as the step itself."""

import pytest

from infer.engine.step.step_costs import StepCosts
from infer.engine.step.step_shares import StepPart, StepShares

QUIET, LOUD = StepPart("quiet", 1, 100), StepPart("loud", 1, 100)


@pytest.fixture
def shares(monkeypatch: pytest.MonkeyPatch) -> StepShares:
    monkeypatch.setattr(StepCosts, "predict", lambda self, work: cost(work.num_sequences))
    return StepShares(StepCosts(), lambda tenant: 1.0)


def cost(num_sequences: int) -> float:
    return 1e-3 * (1 + num_sequences)


def owed_after(shares: StepShares, parts: list[StepPart], num_steps: int, seconds: float) -> float:
    """Return the seconds that the quiet tenant is owed."""
    shares.choose([QUIET, LOUD])
    shares.computed(parts, num_steps, seconds)
    return shares._owed["quiet"]


def test_a_step_that_a_grammar_s_masks_slow_down_is_paid_by_its_tenant(shares: StepShares) -> None:
    """A thread that fills masks takes memory bandwidth and a core from the step, not only the time of the wait."""
    waiting = LOUD._replace(delay=10e-3)
    before = owed_after(shares, [QUIET, waiting], 1, cost(2))
    shares.choose([])
    assert owed_after(shares, [QUIET, waiting], 1, cost(2) + 4e-3) > before + 1e-3


def test_all_tenants_pay_for_a_slow_step_without_a_grammar(shares: StepShares) -> None:
    plain = owed_after(shares, [QUIET, LOUD], 1, 2 * cost(2))
    shares.choose([])
    quick = owed_after(shares, [QUIET, LOUD._replace(delay=1e-6)], 1, 2 * cost(2))
    assert quick == pytest.approx(plain, abs=3e-6)


def test_a_tenant_sits_out_until_all_delays_of_its_grammar_are_paid(shares: StepShares) -> None:
    """All steps of a multi-step may be slow, although the tenant had time for only one of them."""
    num_steps, delay, num_alone, num_shared, seconds = 5, 0.25, 0, 0, 0.0
    while num_shared < 40:
        if len(shares.choose([QUIET, LOUD])) == 2:
            shares.computed([QUIET, LOUD._replace(delay=delay)], num_steps, num_steps * cost(2))
            num_shared, seconds = num_shared + 1, seconds + num_steps * cost(2) + delay
        else:
            assert shares.choose([QUIET, LOUD]) == {"quiet"}
            shares.computed([QUIET], 1, cost(1))
            num_alone, seconds = num_alone + 1, seconds + cost(1)
    assert num_alone * cost(1) > 0.5 * seconds


def test_a_tenant_is_chosen_again_after_fewer_steps_in_one_go_than_it_may_run(shares: StepShares) -> None:
    """For its next step, a tenant must be owed the time of one of its last steps, not of all."""
    parts = [QUIET, *[LOUD] * 9]
    shares.choose(parts)
    shares.computed(parts[1:], 1, 13 * cost(1))
    assert shares.choose(parts) == {"quiet"}
    promised = shares.most_steps
    assert promised > 4
    shares.computed([QUIET], promised - 1, (promised - 1) * cost(1))
    assert shares.choose(parts) == {"quiet"}
