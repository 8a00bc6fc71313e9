"""Claims about the sizes in which steps are recorded for a GPU: few sizes, and each has room for its steps."""

import pytest

from infer.compute.operands.limits import GPU_STEP, HOST_STEP, StepLimits

pytest.importorskip("triton", reason="Triton is not installed")

from infer.compute.backends.cuda.step_sizes import size_for, sizes_ahead


@pytest.mark.parametrize("limits", [GPU_STEP, HOST_STEP, StepLimits(6, 4), StepLimits(512, 512)], ids=str)
def test_each_step_has_a_size_with_room_for_it(limits: StepLimits) -> None:
    steps = [
        (num_tokens, num_logits)
        for num_tokens in {*range(1, min(600, limits.tokens) + 1), limits.tokens // 2 + 1, limits.tokens}
        for num_logits in {0, 1, 3, 9, 65, num_tokens, limits.logits}
        if num_logits <= min(num_tokens, limits.logits)
    ]
    for num_tokens, num_logits in steps:
        size = size_for(num_tokens, num_logits, limits)
        assert num_tokens <= size.tokens <= min(2 * num_tokens, limits.tokens)
        assert (size.logits == 0) == (num_logits == 0)
        assert num_logits <= size.logits <= limits.logits
        if num_tokens == num_logits:
            assert size.logits <= size.tokens, "a step of decoding has no more lines than tokens"
    assert len({size_for(*step, limits) for step in steps}) <= 48


def test_few_sizes_are_recorded_ahead_and_a_step_may_have_one_of_them() -> None:
    assert list(sizes_ahead(GPU_STEP)) == [(1, 1), (8, 8), (16, 16), (64, 64), (512, 8), (8192, 8)]
    assert list(sizes_ahead(StepLimits(16, 4))) == [(1, 1), (16, 4)]
    for size in sizes_ahead(GPU_STEP):
        assert size_for(size.tokens, size.logits, GPU_STEP) == size
