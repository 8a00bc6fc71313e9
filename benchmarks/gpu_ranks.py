"""`check_gpu`'s check of ranks on several devices: a shared model of a file has the bits of one process.

The ranks' program imports `tokenizers`, which the other sections do not need.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from gpu_models import generated, random_ids
from infer.engine.runner.runner import Runner
from infer.engine.tensor_parallel.leading import LeadingRunner
from infer.engine.tensor_parallel.ranks import ModelSource, Ranks, Transport
from infer.files import open_checkpoint
from infer.model_settings import ModelSettings
from infer.models.families import make_architecture
from infer.models.from_checkpoint import load_checked


def check_ranks(path: Path, devices: Sequence[str], transport: Transport, count: int) -> Iterator[dict[str, Any]]:
    """Check that a rank per device, with recorded steps and op by op, writes the tokens of one process."""
    checkpoint, context = open_checkpoint(path), 2 * count + 32
    architecture = make_architecture(checkpoint.config)
    prompt = random_ids(20, 0, architecture.vocab_size)
    settings = ModelSettings(device=devices[0], max_seq_len=context)
    source = ModelSource(checkpoint.path, checkpoint.fingerprint(), settings, 1, tuple(devices))

    def write(ranks: Ranks | None, *, capture: bool) -> list[int]:
        model = load_checked(checkpoint, None, settings, group=None if ranks is None else ranks.group)
        if ranks is None:
            return generated(Runner(model, context, capture=capture), [prompt], count, 1, temperature=0.8)[0]
        runner = LeadingRunner(ranks, model, capacity=context, capture=capture)
        runner.check_logits()
        return generated(runner, [prompt], count, 1, temperature=0.8)[0]

    expected = write(None, capture=True)
    ranks = Ranks(source, architecture, len(devices), transport)
    try:
        for capture in (True, False):
            is_right = write(ranks, capture=capture) == expected
            yield {"op": f"{len(devices)} ranks, {'recorded' if capture else 'op by op'}", "type": path.name,
                   "tokens": count, "error": float(not is_right), "is_right": is_right}  # fmt: skip
    finally:
        ranks.close()
