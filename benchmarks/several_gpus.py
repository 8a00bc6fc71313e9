"""`check_gpu`'s section on several GPUs: a model on one leaves the others alone, and a shared one has its bits."""

from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from gpu_models import GREEDY, SHAPES, generated, make_model, make_runner, random_ids


def check_gpus(device: torch.device, is_tiny: bool, path: Path | None) -> Iterator[dict[str, Any]]:
    """Check two GPUs: first that each can be used by itself, then that they can share the model of a file."""
    count = torch.cuda.device_count() if device.type == "cuda" else 0
    if count < 2:
        yield {"skipped": f"{count} GPUs are here, and this needs two"}
        return
    yield from _check_each("tiny" if is_tiny else "two layers")
    if path is None:
        yield {"skipped": "no --model is given that two GPUs could share"}
    elif find_spec("tokenizers") is None:
        yield {"skipped": "tokenizers is not installed, which ranks import"}
    else:
        yield from import_module("gpu_ranks").check_ranks(path, ("cuda:0", "cuda:1"), "nccl", 64)


def _check_each(shape: str) -> Iterator[dict[str, Any]]:
    """Check that a model on cuda:1 writes what it writes on cuda:0, and leaves the memory of cuda:0 as it was."""
    texts = list[list[int]]()
    for index in (1, 0):  # the second device is first, while the first one has no context
        model = make_model(shape, "Q4_0", torch.device("cuda", index), 256)
        prompt = random_ids(20, 0, SHAPES[shape]["vocab_size"])
        texts.append(generated(make_runner(model, 1, 256), [prompt], 64, 16, **GREEDY)[0])
        if index == 1:
            taken = torch.cuda.memory_stats(0).get("reserved_bytes.all.peak", 0)
            yield {"op": "bytes on cuda:0", "error": taken, "is_right": taken == 0}
    yield {"op": "the same text on cuda:1", "error": float(texts[0] != texts[1]), "is_right": texts[0] == texts[1]}
