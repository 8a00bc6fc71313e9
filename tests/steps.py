"""Steps of several rows, for tests that make each row's step by itself."""

from collections.abc import Sequence

import torch

from infer.operands.step import Step


def join(steps: Sequence[Step]) -> Step:
    """Return several rows' steps as one."""
    offsets = [0]
    for step in steps:
        offsets.append(offsets[-1] + len(step.tokens))
    return Step(
        tokens=torch.cat([each.tokens for each in steps]),
        positions=torch.cat([each.positions for each in steps]),
        rows=torch.cat([each.rows for each in steps]),
        logit_indices=torch.cat([each.logit_indices + start for each, start in zip(steps, offsets, strict=False)]),
    )
