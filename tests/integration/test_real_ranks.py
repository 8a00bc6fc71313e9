"""SmolLM2 shared by ranks, through shared memory and through gloo, has the logits of one process, to the bit."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from extent import IS_WHOLE
from infer.compute.backends.cpu.threads.pool import set_num_threads
from infer.engine.runner.runner import Runner
from infer.engine.tensor_parallel.rank_settings import Transport
from test_tensor_parallel import ranks_of, runner_of

pytestmark = pytest.mark.slow

PROMPT, NUM_NEW = list(range(100, 120)), 12
CASES: tuple[tuple[int, Transport], ...] = (2, "memory"), (4, "gloo")
if IS_WHOLE:
    CASES = *CASES, (4, "memory"), (2, "gloo")


def logits_of(runner: Runner) -> Tensor:
    """Return the logits of a prompt, and after each of a dozen greedy tokens."""
    logits = [runner.append(0, PROMPT, len(PROMPT))]
    for _ in range(NUM_NEW):
        logits.append(runner.append(0, [int(logits[-1][-1].argmax())], 1))
    return torch.cat(logits)


def test_smollm2_has_the_bits_of_one_rank(smollm2_path: Path) -> None:
    """Its 9 heads and 3 heads of keys are divided unequally between two ranks."""
    set_num_threads(1)
    expected = logits_of(runner_of(smollm2_path))
    for size, transport in CASES:
        ranks = ranks_of(smollm2_path, size, transport)
        try:
            runner = runner_of(smollm2_path, ranks, capture=transport == "memory")
            assert torch.equal(logits_of(runner), expected)
            if (size, transport) == (2, "memory"):
                check_commands(runner)
        finally:
            ranks.close()


def check_commands(runner: Any) -> None:
    """Check that a recorded layer quantises its results and copies nothing. Ranks only wait after its products."""
    commands = runner._captured._recording.commands
    labels = [command.label for command in commands if command.label.startswith("L0.")]
    assert [label.removeprefix("L0.") for label in labels if "matmul" not in label] == [
        *("qkv.normalize", "qkv.barrier", "attend.rotate", "attend.few", "attend.many", "attend.merge"),
        *("attend.barrier", "output.barrier", "output.add", "gate_up.normalize", "gate_up.barrier"),
        *("down.barrier", "down.add"),
    ]
