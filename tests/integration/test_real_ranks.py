"""SmolLM2 shared out among ranks, through shared memory and through gloo: the logits of one process, to the bit."""

from pathlib import Path

import torch
from torch import Tensor

from infer.backends.cpu.threads import set_num_threads
from infer.runner.runner import Runner
from test_tensor_parallel import ranks_of, runner_of

PROMPT, NUM_NEW = list(range(100, 120)), 12


def logits_of(runner: Runner) -> Tensor:
    """Of a prompt, and after each of a dozen greedy tokens."""
    logits = [runner.append(0, PROMPT, len(PROMPT))]
    for _ in range(NUM_NEW):
        logits.append(runner.append(0, [int(logits[-1][-1].argmax())], 1))
    return torch.cat(logits)


def test_smollm2_has_the_bits_of_one_rank(smollm2_path: Path) -> None:
    """Its 9 heads and 3 heads of keys are more for one of two ranks than for the other."""
    set_num_threads(1)
    expected = logits_of(runner_of(smollm2_path))
    for size, transport in ((2, "memory"), (4, "memory"), (2, "gloo"), (4, "gloo")):
        ranks = ranks_of(smollm2_path, size, transport)
        try:
            assert torch.equal(logits_of(runner_of(smollm2_path, ranks, capture=transport == "memory")), expected)
        finally:
            ranks.close()
